"""The time model finds the features and speeds that the times were made of, and takes varying work out of times."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cost.features import FEATURES, share_features
from lightning_hetero.core.timing.cost.model import LEAST_STEPS, fit_cost, reduced_to_plan

SIZES, SPEEDS = np.array([16.0, 8.0, 4.0]), np.array([1.0, 2.0, 4.0])


def shares(steps, seed, sizes=SIZES, count=lambda n, rng: int(n)):
    rng = np.random.default_rng(seed)
    return np.array([[share_features(rng.lognormal(0, 0.7, count(n, rng))) for n in sizes] for _ in range(steps)])


def times_of(work, theta, fixed=5.0, noise=0.02, seed=0):
    exact = fixed + SPEEDS * (work @ np.array(theta))
    return exact * np.exp(np.random.default_rng(seed).normal(0, noise, exact.shape))


@pytest.mark.parametrize(
    "theta",
    [(0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0.7, 0, 0.3, 0), (0, 0, 0.6, 0, 0.4)],
    ids=["cost", "padded", "squares", "attention"],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_features_are_those_of_the_times(theta, seed):
    work = shares(80, seed)
    fit = fit_cost(work, times_of(work, theta, seed=seed), np.tile(SIZES, (80, 1)))
    unit = (work @ np.array(theta)).sum() / (80 * SIZES.sum())
    assert [name for name, weight in zip(FEATURES, fit.theta, strict=True) if weight > 0] == [
        name for name, weight in zip(FEATURES, theta, strict=True) if weight > 0
    ]
    np.testing.assert_allclose(fit.slope, SPEEDS * unit, rtol=0.1)
    np.testing.assert_allclose((work @ np.array(fit.theta)).sum(), 80 * SIZES.sum())


def test_samples_count_where_their_number_varies():
    work = shares(120, 4, count=lambda n, rng: int(n * rng.uniform(0.5, 1.5)))
    fit = fit_cost(work, times_of(work, (0.6, 0.4, 0, 0, 0)), np.tile(SIZES, (120, 1)))
    assert fit.theta[0] > 0.4
    assert fit.theta[1] > 0.2
    assert sum(fit.theta[2:]) == 0


def test_steps_that_took_far_longer_do_not_count():
    work = shares(80, 5)
    times = times_of(work, (0, 0, 1, 0, 0))
    times[::11, 1] *= 4
    fit = fit_cost(work, times, np.tile(SIZES, (80, 1)))
    np.testing.assert_allclose(np.array(fit.slope) / fit.slope[0], SPEEDS, rtol=0.15)


@pytest.mark.parametrize(("every", "factor"), [(30, 300), (60, 300), (30, 100), (10, 20)])
def test_stalls_of_all_workers_do_not_count(every, factor):
    for seed in range(12):
        work = shares(60, seed)
        times = times_of(work, (0, 0, 1, 0, 0), seed=seed)
        times[seed % every :: every] *= factor
        fit = fit_cost(work, times, np.tile(SIZES, (60, 1)))
        np.testing.assert_allclose(np.array(fit.theta) / fit.theta[2], (0, 0, 1, 0, 0), atol=0.3)
        np.testing.assert_allclose(np.array(fit.slope) / fit.slope[0], SPEEDS, rtol=0.2)


def test_a_step_without_samples_does_not_count():
    """The ragged last batch may have fewer samples than there are workers."""
    work = shares(60, 2)
    times = times_of(work, (0, 0, 1, 0, 0))
    for worker in range(3):
        work[10 * worker, worker], times[10 * worker, worker] = 0.0, 0.0
    fit = fit_cost(work, times, np.tile(SIZES, (60, 1)))
    np.testing.assert_allclose(np.array(fit.slope) / fit.slope[0], SPEEDS, rtol=0.15)
    work[:, 1], times[:, 1] = 0.0, 0.0
    fit = fit_cost(work, times, np.tile(SIZES, (60, 1)))
    assert fit.fixed[1] == 0.0
    np.testing.assert_allclose(fit.slope[2] / fit.slope[0], 4.0, rtol=0.15)


def test_times_that_are_not_known_do_not_count():
    work = shares(60, 3)
    times = times_of(work, (0, 0, 1, 0, 0))
    times[5, 0], times[9, 2] = np.nan, np.inf
    fit = fit_cost(work, times, np.tile(SIZES, (60, 1)))
    np.testing.assert_allclose(np.array(fit.slope) / fit.slope[0], SPEEDS, rtol=0.15)


def test_reduced_times_stay_above_0():
    """Also of a share with many times the planned work, whose time was short for another reason."""
    work, theta = shares(40, 1), np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    raw = observed(work, theta)
    work[7] *= 50
    reduced = reduced_to_plan(replace(raw, work=work), theta)
    for name in ("forward", "backward", "step_time"):
        assert getattr(reduced, name).min() > 0


def test_too_few_steps_teach_nothing():
    work = shares(LEAST_STEPS - 1, 0)
    assert fit_cost(work, times_of(work, (0, 1, 0, 0, 0)), np.tile(SIZES, (len(work), 1))) is None


def observed(work, theta, noise=0.0):
    compute = times_of(work, theta, noise=noise)
    forward, backward = 0.4 * compute, 0.6 * compute
    slowest = compute.max(axis=1, keepdims=True)
    link = 2.0
    end = slowest + link
    fields = [np.tile(SIZES, (len(work), 1)), forward, backward, 0.5 * backward, np.zeros_like(forward)]
    fields += [end - compute, np.tile(end, (1, 3))]
    return StepObservations(*fields, bucket_ends=(end - forward)[:, :, None], work=work)


def test_times_are_those_of_the_planned_work():
    """Without noise, all steps look alike: as if each worker had had exactly what the plan gives it."""
    work, theta = shares(40, 1), np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    theta = theta * 40 * SIZES.sum() / (work @ theta).sum()
    reduced = reduced_to_plan(observed(work, theta), theta)
    planned = 5.0 + SPEEDS * SIZES
    np.testing.assert_allclose(reduced.compute, np.tile(planned, (40, 1)), rtol=1e-9)
    np.testing.assert_allclose(reduced.last_sync, np.tile(planned.max() + 2.0 - planned, (40, 1)), rtol=1e-9)
    np.testing.assert_allclose(reduced.step_time, planned.max() + 2.0, rtol=1e-9)
    np.testing.assert_allclose(reduced.bucket_ends[:, :, 0], np.tile(planned.max() + 2.0 - 0.4 * planned, (40, 1)))
    assert reduced.work.shape == (40, 3, 0)


def test_times_without_features_of_the_work_stay():
    seen = replace(observed(shares(4, 0), (0, 1, 0, 0, 0)), work=None)
    reduced = reduced_to_plan(seen, (0, 1, 0, 0, 0))
    np.testing.assert_array_equal(reduced.compute, seen.compute)
