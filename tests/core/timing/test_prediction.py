"""Predicted steps: when workers finish, what another split saves, and what it may lose to what is not known."""

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.timing.link_times import Level, LinkTimes
from lightning_hetero.core.timing.prediction import StepPrediction
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS, EstimatorSettings, Times
from tests.equations.clusters import CLUSTER, context, measure


def saving(planner, cluster, times, plan, running, ctx):
    """Share of a step that a plan saves in expectation, and the share that it loses to what is not known."""
    here = np.array(running.local_batch_sizes) * (ctx.total_batch_size / running.total_batch_size)
    return planner._prediction(times, ctx).saving(cluster, plan.local_batch_sizes, here)


def test_what_is_not_known_is_what_a_step_may_lose_to_it():
    """By drawing the workers' times from what is known of them: the mean of the slowest, and a deviation more."""
    rng, ctx = np.random.default_rng(3), context(192, 3)
    planner = PerfModelPlanner().observe(measure(CLUSTER, (64, 64, 64), rng, noise=0.3), ctx)
    plan, times = BatchPlan(192, (64, 64, 64)), planner.times.times(ctx.identities)
    cluster = planner._prediction(times, ctx).model(np.array(plan.local_batch_sizes))
    other = BatchPlan(192, (100, 60, 32))
    gain, unknown = saving(planner, cluster, times, other, plan, ctx)
    seconds, errors, _ = planner._prediction(times, ctx).finish(np.full(3, 64.0))
    factors = 1.0 + errors / seconds * rng.standard_normal((400_000, 3))
    here, there = ((cluster.finish_times(p.local_batch_sizes) * factors).max(axis=1) for p in (plan, other))
    assert gain == pytest.approx(1.0 - there.mean() / here.mean(), abs=0.003)
    slowest = cluster.finish_times(other.local_batch_sizes).max()
    assert unknown == pytest.approx(1.0 - slowest / (there.mean() + there.std()), abs=0.003)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("gamma", [0.2, 0.95])
def test_the_error_of_a_finish_is_that_of_drawn_coefficients(gamma, accumulation):
    """Computing and sending of one worker are late together: with one bucket they are almost the same time."""
    rng, ctx = np.random.default_rng(0), context(192, 3, accumulation=accumulation)
    wide = ClusterTimeModel(CLUSTER.nodes, gamma, t_o=0.002, t_u=0.004)
    planner = PerfModelPlanner()
    for sizes in ((64, 64, 64), (90, 60, 42)):
        planner = planner.observe(measure(wide, sizes, rng, noise=0.2), ctx)
    times, sizes = planner.times.times(ctx.identities), np.array([100.0, 60.0, 32.0])
    _, errors, _ = planner._prediction(times, ctx).finish(sizes)
    (t_o, t_u), gamma, n = planner.link.at(3), planner._prediction(times, ctx).gamma, accumulation
    for worker in range(3):
        q, s, k, m = rng.multivariate_normal(times.mean[worker], times.covariance[worker], 200_000).T
        a, p = q * sizes[worker] + s, k * sizes[worker] + m
        finish = np.maximum(n * a + n * p, n * a + (n - 1 + gamma) * p + t_o) + t_u
        assert errors[worker] == pytest.approx(finish.std(), rel=0.02)


def test_a_split_in_proportion_gains_nothing_at_another_total():
    rng, sizes = np.random.default_rng(0), (60, 30, 6)
    planner = PerfModelPlanner().observe(measure(CLUSTER, sizes, rng), context(96, 3))
    times, ctx, twice = planner._times(context(96, 3)), context(192, 3), BatchPlan(192, (120, 60, 12))
    model = planner._prediction(times, ctx).bare

    def gain(running):
        return saving(planner, model, times, twice, running, ctx)[0]

    assert gain(BatchPlan(96, sizes)) == pytest.approx(0.0, abs=1e-9)
    assert gain(BatchPlan(96, (32, 32, 32))) > 0.2


def predicted(mean, jitter, settings=ESTIMATOR_DEFAULTS):
    """Of two workers that know their link and residual."""
    times = Times(np.array(mean), np.full((2, 4, 4), 1e-6) * np.eye(4), np.full((2, 2), jitter), np.ones(1), np.ones(1))
    link, residual = LinkTimes(sync={2: (Level(0.0, 0.0), Level(0.01, 0.0))}), Residual(covariance=(0.0, 0.0, 0.0))
    return StepPrediction(times, link, residual, (1, 1), settings=settings)


def test_an_error_grows_with_the_wait_in_single_steps_as_the_step_does():
    settings = EstimatorSettings(waiting_error=0.0)
    calm, jittery = (predicted([[0.001, 0.0, 0.002, 0.0]] * 2, jitter, settings) for jitter in (0.0, 0.3))
    assert calm.waiting_factor([20, 20]) < 1.01 < 1.1 < jittery.waiting_factor([20, 20])
    ratio = jittery.waiting_factor([20, 20]) / calm.waiting_factor([20, 20])
    assert jittery.error([20, 20]) / calm.error([20, 20]) == pytest.approx(ratio)


def test_a_worker_without_a_share_is_waited_for_while_it_runs_its_least_number_of_samples():
    found = predicted([[0.3, 0.0, 0.7, 0.0], [0.0075, 0.0, 0.0175, 0.0]], 0.3)
    assert found.waiting_factor([0, 40]) == found.waiting_factor([1, 40]) > 1.1
