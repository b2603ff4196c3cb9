"""The decision rule: equal workers stay equal whatever their number, and a change has to pay while it holds."""

import numpy as np
import pytest

from lightning_hetero.core.split_rule import RuleSettings, horizon, shrunk


@pytest.mark.parametrize("workers", [2, 3, 8, 16, 32, 100, 1000])
@pytest.mark.parametrize("error", [0.002, 0.05])
def test_equal_workers_are_found_equal(workers, error):
    """The largest of many estimates is partly luck: what is made of it does not grow with their number."""
    rng, spread = np.random.default_rng(workers), []
    for _ in range(200):
        likely = shrunk(np.exp(error * rng.standard_normal(workers)), np.full(workers, error))
        spread.append(np.log(likely.max() / likely.min()) / error)
    assert np.mean(np.array(spread) > 0.5) <= 0.06
    assert np.median(spread) < 0.1


@pytest.mark.parametrize("workers", [2, 3, 16, 100])
def test_a_worker_that_is_clearly_late_counts_as_it_is(workers):
    rng = np.random.default_rng(0)
    seconds = np.exp(0.01 * rng.standard_normal(workers))
    seconds[0] *= 1.3
    likely = shrunk(seconds, np.full(workers, 0.01))
    assert likely[0] / likely[1:].mean() == pytest.approx(1.3, abs=0.03)


def test_workers_that_all_differ_count_as_they_are():
    seconds = np.linspace(1.0, 4.0, 16)
    np.testing.assert_allclose(shrunk(seconds, np.full(16, 0.01)), seconds, rtol=0.01)


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_pushed_out_of_what_was_seen(seed):
    rng = np.random.default_rng(seed)
    seconds = np.exp(rng.standard_normal(rng.integers(2, 40)) * rng.uniform(0, 1))
    likely = shrunk(seconds, rng.uniform(1e-9, 0.3) * seconds)
    assert seconds.min() * (1 - 1e-9) <= likely.min() <= likely.max() <= seconds.max() * (1 + 1e-9)
    order = np.argsort(seconds)
    if np.ptp(seconds[order]) > 0:
        assert (np.diff(likely[order]) >= -0.05 * seconds.max()).all()


def test_where_speeds_move_estimates_count_as_they_are():
    rng = np.random.default_rng(0)
    seconds = np.exp(0.02 * rng.standard_normal(16))
    still, moving = (shrunk(seconds, np.full(16, 0.01), moving=share) for share in (0.0, 1.0))
    assert np.log(still).std() < 0.5 * np.log(seconds).std()
    assert np.log(moving).std() > 0.9 * np.log(seconds).std()


def test_one_worker_is_left_alone():
    assert shrunk(np.array([2.0]), np.array([0.1])).tolist() == [2.0]


WALKS = np.array([0.0005, 0.01, 0.03])


def test_a_split_holds_as_long_as_the_run_is_old():
    quiet = np.array([1.0, 0.0, 0.0])
    assert horizon(0.1, WALKS, quiet, 10) == RuleSettings().least_horizon
    assert horizon(0.1, WALKS, quiet, 5000) == 5000


def test_a_gain_that_speeds_outrun_holds_for_few_steps():
    moving = np.array([0.0, 0.0, 1.0])
    assert horizon(0.06, WALKS, moving, 5000) == pytest.approx(8 * 4)
    assert horizon(0.001, WALKS, moving, 5000) == 8
    both = np.array([0.5, 0.0, 0.5])
    assert horizon(0.06, WALKS, both, 5000) == pytest.approx((5000 + 32) / 2)
