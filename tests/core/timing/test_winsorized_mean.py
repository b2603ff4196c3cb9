"""Means of windows whose longest tenth counts no more than the longest of the rest."""

import numpy as np
import pytest
from scipy.stats.mstats import winsorize

from lightning_hetero.core.timing.winsorized_mean import num_winsorized, winsorize_top, winsorized_mean


@pytest.mark.parametrize("steps", [3, 9, 10, 11, 64])
def test_it_is_the_one_sided_winsorized_mean_of_statistics(steps):
    seconds = np.random.default_rng(steps).lognormal(sigma=0.5, size=steps)
    expected = winsorize(seconds, limits=(0.0, (num_winsorized(steps) + 0.5) / steps))
    np.testing.assert_allclose(winsorize_top(seconds), expected)
    assert winsorized_mean(seconds) == pytest.approx(expected.mean())


def test_one_odd_step_of_a_window_hardly_counts_and_one_of_two_does():
    assert winsorized_mean(np.array([1.0] * 9 + [1000.0])) == 1.0
    assert winsorized_mean(np.array([1.0, 3.0])) == 2.0


def test_steps_that_often_take_long_are_in_the_mean():
    """As under a quota, where a fifth of the steps waits for the next period."""
    assert winsorized_mean(np.array([1.0, 1.0, 1.0, 1.0, 6.0] * 4)) == 2.0


def test_workers_are_apart_and_a_window_without_steps_stays_empty():
    seconds = np.random.default_rng(0).lognormal(size=(20, 3))
    each = np.stack([winsorize_top(worker) for worker in seconds.T], axis=1)
    np.testing.assert_array_equal(winsorize_top(seconds), each)
    assert winsorize_top(np.zeros((0, 3))).shape == (0, 3)
