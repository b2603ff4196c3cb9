"""The decision rule: equal workers stay equal whatever their number, and a change has to pay while it holds."""

import math

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


def test_a_gain_that_speeds_outrun_saves_in_fewer_steps():
    moving = np.array([0.0, 0.0, 1.0])
    for gain, steps in ((0.06, 5000), (0.01, 1000), (0.3, 200)):
        ratio = min(gain / (0.03 * math.sqrt(steps / 8) * math.sqrt(2 * math.pi)), 1.0)
        assert horizon(gain, WALKS, moving, steps) == pytest.approx(steps * ratio * (2 - ratio))
    assert horizon(0.0001, WALKS, moving, 200) == 8
    assert horizon(-0.1, WALKS, moving, 200) == 8
    both = np.array([0.5, 0.0, 0.5])
    assert horizon(0.06, WALKS, both, 5000) == pytest.approx((5000 + horizon(0.06, WALKS, moving, 5000)) / 2)


@pytest.mark.parametrize("gain", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("walk", [0.003, 0.02, 0.06])
def test_the_horizon_is_what_a_split_saves_while_speeds_walk(gain, walk):
    """By simulation: a worker that is late by the gain, and one that is not, walk alike."""
    steps, rng = 512, np.random.default_rng(0)
    paths = np.cumsum(walk * rng.standard_normal((4000, steps // 8)), axis=1)
    saved = np.abs(gain + paths).mean(axis=0) - np.abs(paths).mean(axis=0)
    exact = 8 * saved.sum() / gain
    assert 0.95 * exact <= horizon(gain, np.array([walk]), np.ones(1), steps) <= 1.35 * exact
