"""Finish times as two lines: what fits into a time, for which workers, within which bounds."""

import numpy as np
import pytest

from lightning_hetero.core.batching.finish_lines import FinishLines, check_bounds
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel


def lines_of(seed, workers=5, high=1e9):
    rng = np.random.default_rng(seed)
    nodes = tuple(NodeTimeModel(*rng.uniform(1e-4, 1e-2, 4)) for _ in range(workers))
    cluster = ClusterTimeModel(nodes, rng.uniform(0.0, 1.0), *rng.uniform(0.0, 0.05, 2))
    return cluster, FinishLines.of(cluster, np.zeros(workers), np.full(workers, high))


@pytest.mark.parametrize("seed", range(5))
def test_what_fits_into_a_time_takes_just_that(seed):
    cluster, lines = lines_of(seed)
    b = np.random.default_rng(seed).uniform(1.0, 100.0, 5)
    np.testing.assert_allclose(lines.finish(b), cluster.finish_times(b))
    for worker, seconds in enumerate(lines.finish(b)):
        assert lines.capacity(seconds)[0][worker] == pytest.approx(b[worker])


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_is_that_of_what_fits(seed):
    _, lines = lines_of(seed, high=40.0)
    at = float(np.median(lines.finish(np.full(5, 30.0))))
    more = lines.capacity(at + 1e-7)[0] - lines.capacity(at)[0]
    np.testing.assert_allclose(lines.capacity(at)[1], more / 1e-7, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_all_finish_together_where_no_bound_holds(seed):
    _, lines = lines_of(seed)
    time, sizes, bounded = lines.solve(1000)
    assert (sizes.sum(), bounded) == (pytest.approx(1000.0), False)
    np.testing.assert_allclose(lines.finish(sizes), time)


def test_some_of_the_workers_are_as_they_were():
    _, lines = lines_of(0)
    keep = np.array([True, False, True, False, True])
    np.testing.assert_array_equal(lines.part(keep).finish(np.ones(3)), lines.finish(np.ones(5))[keep])


def test_bounds_are_one_for_all_or_one_for_each():
    low, high = check_bounds(3, 12, [1, 2, 3], 8)
    assert (low.tolist(), high.tolist()) == ([1, 2, 3], [8, 8, 8])
    assert check_bounds(2, 12, 0, [100, 5])[1].tolist() == [12, 5], "nobody gets more than the total"
    with pytest.raises(ValueError, match="2 entries for 3 workers"):
        check_bounds(3, 12, [1, 2], None)
