"""Exact optimum against every split, against events, and against the package's own solver."""

import itertools

import numpy as np
import pytest

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.simulate.cluster.truth.optimum import CostLines, best_split


def splits(total, low, high):
    """All integer splits within bounds."""
    ranges = [range(int(a), int(min(b, total)) + 1) for a, b in zip(low, high, strict=True)]
    return [sizes for sizes in itertools.product(*ranges) if sum(sizes) == total]


def drawn(rng, workers):
    buckets = int(rng.integers(1, 5))
    coefficients = rng.exponential(1.0, (4, workers)) * rng.choice([0.0, 0.1, 1.0], (4, 1), p=[0.1, 0.3, 0.6])
    seconds = rng.exponential(rng.choice([0.0, 0.5, 3.0]), buckets)
    return coefficients, np.sort(rng.random(buckets)), seconds


@pytest.mark.parametrize("seed", range(4))
def test_no_split_is_better(seed):
    rng = np.random.default_rng(seed)
    for _ in range(150):
        workers, total = int(rng.integers(1, 4)), int(rng.integers(4, 13))
        coefficients, shares, seconds = drawn(rng, workers)
        lines, low = CostLines.of(coefficients, shares, seconds), np.ones(workers)
        high = rng.integers(-(-total // workers), total + 1, workers).astype(float)
        found, sizes = best_split(lines, total, low, high)
        every = np.array([lines.seconds(split).max() for split in splits(total, low, high)])
        assert sizes.sum() == total
        assert (sizes >= low).all()
        assert (sizes <= high).all()
        assert found == pytest.approx(every.min(), rel=1e-9)
        assert lines.seconds(sizes).max() == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_as_good_as_the_solver_of_the_planners(seed):
    """Two searches that share nothing, on the times of C eq. 7: two buckets."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        workers = int(rng.integers(2, 40))
        q, s, k, m = rng.uniform(0.1, 1.0, (4, workers)) * 1e-2
        gamma, first, last = rng.uniform(0.05, 0.5), *rng.uniform(0.0, 0.05, 2)
        lines = CostLines.of(np.array([q, s, k, m]), np.array([gamma, 1.0]), np.array([first, last]))
        nodes = [NodeTimeModel(*values) for values in zip(q, s, k, m, strict=True)]
        total = int(rng.integers(2 * workers, 50 * workers))
        plan = solve_optperf(ClusterTimeModel(nodes, gamma, first, last), total, min_local=(1,) * workers)
        best, _ = best_split(lines, total, np.ones(workers), np.full(workers, float(total)))
        assert lines.seconds(plan.local_batch_sizes).max() == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("total", [1, 11])
def test_a_total_that_fits_no_split_is_named(total):
    lines = CostLines(np.ones((1, 2)), np.zeros((1, 2)))
    with pytest.raises(ValueError, match=f"a total batch of {total} samples does not fit workers"):
        best_split(lines, total, np.ones(2), np.full(2, 5.0))
