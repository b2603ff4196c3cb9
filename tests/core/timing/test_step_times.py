"""What is known of workers' times: the mean as long as nothing changes, the moving average when something does."""

import numpy as np
import pytest

from lightning_hetero.core.timing.step_times import SmoothingSettings, StepTimes

SETTINGS = SmoothingSettings()


def seen(rng, seconds, noise, steps, times=None, decay=0.9):
    times = StepTimes() if times is None else times
    for _ in range(steps):
        times = times.observe(seconds * np.exp(noise * rng.standard_normal(len(seconds)))).current()
    return times


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_noise_is_known_from_steps(noise):
    times = seen(np.random.default_rng(0), np.array([0.1, 3.0]), noise, 200)
    assert times.noise == pytest.approx([noise, noise], rel=0.3)


def test_one_long_step_or_one_change_of_speed_is_no_noise():
    rng, seconds = np.random.default_rng(0), np.array([0.1, 0.1])
    times = seen(rng, seconds, 0.02, 20)
    times = times.observe([1.0, 0.1])
    times = seen(rng, seconds, 0.02, 20, times)
    times = seen(rng, 4 * seconds, 0.02, 10, times)
    assert max(times.noise) < 0.035


def test_what_is_known_of_a_steady_worker_becomes_more_precise():
    worst = []
    for seed in range(20):
        times = seen(np.random.default_rng(seed), np.array([1.0, 1.0]), 0.15, 200)
        worst.append(np.abs(times.best - np.exp(0.15**2 / 2)).max())
    assert max(times.errors) < 0.015
    assert np.mean(worst) < 0.02  # the moving average alone: 0.15 / sqrt(19) = 0.034


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.15])
def test_a_change_of_speed_is_followed_as_by_the_moving_average(noise):
    rng = np.random.default_rng(1)
    times = seen(rng, np.array([1.0, 1.0]), noise, 200)
    times = seen(rng, np.array([2.0, 1.0]), noise, 20, times)
    assert times.best[0] > 1.75  # 2 - 0.9 ** 20
    assert times.steps < 60


def test_noise_is_remembered_from_one_split_to_the_next():
    times = seen(np.random.default_rng(0), np.array([1.0, 1.0]), 0.1, 50).restarted()
    assert times.best.tolist() == []
    after = times.observe([1.0, 1.0])
    assert after.steps == 1
    assert after.errors.min() > 0.08


def test_what_is_known_is_of_the_newest_steps():
    """Precision has an end, since the mean looks back so far; and of noise that is over nothing is left."""
    rng, seconds = np.random.default_rng(0), np.array([1.0])
    times = seen(rng, seconds, 0.2, 300)
    assert times.steps == SETTINGS.longest_mean_steps
    times = seen(rng, seconds, 0.01, SETTINGS.noise_steps + 1, times.restarted())
    assert times.noise == pytest.approx([0.01], rel=0.3)


def test_noise_is_taken_for_larger_where_it_is_of_few_steps():
    times = StepTimes().observe([1.0]).observe([np.exp(0.1)])
    assert times.noise == pytest.approx([3 * 0.1 / 1.128])


def test_a_moving_average_is_compared_with_a_mean_that_holds_the_same_steps():
    """20 steps, of which the average weighs the newest most: by chance they differ less than each from the truth."""
    times = StepTimes((1.04,), 0.06, (1.0,), steps=20, count=20, newest=(1.0,), differences=((0.05,),) * 30)
    assert times.current().best.tolist() == [1.04]


@pytest.mark.parametrize("name", ["noise_steps", "longest_mean_steps", "outlier_ratio", "leaving_errors"])
def test_a_setting_out_of_range_is_refused(name):
    with pytest.raises(ValueError, match=rf"SmoothingSettings\.{name}"):
        SmoothingSettings(**{name: -1})


def test_a_mean_that_is_never_given_up_follows_nothing():
    """Settings reach the times: 20 steps after a change the mean is still of all steps."""
    rng = np.random.default_rng(1)
    stubborn = StepTimes(settings=SmoothingSettings(leaving_errors=1e9))
    times = seen(rng, np.array([2.0]), 0.02, 20, seen(rng, np.array([1.0]), 0.02, 180, stubborn))
    assert times.best[0] == pytest.approx(1.1, abs=0.02)
