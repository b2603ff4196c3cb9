"""Metrics under their fixed names: what there is with no step, with no model, and with steps that are no steps."""

import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.metrics import noise_metrics, plan_metrics
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations

PLAN = BatchPlan(8, (6, 2))


def steps(step_time, compute=((0.3, 0.1),) * 4):
    compute = np.array(compute)
    zeros = np.zeros_like(compute)
    return StepObservations(zeros + 4, compute, zeros, zeros, zeros, zeros, np.array(step_time)[:, None] + zeros)


def test_with_no_steps_there_is_the_plan_and_what_is_predicted():
    found = plan_metrics(StepObservations.empty(2), PLAN, 0.5, error=0.1)
    sizes = {"hetero/local_batch_size/rank0": 6.0, "hetero/local_batch_size/rank1": 2.0}
    predicted = {"hetero/predicted_step_time": 0.5, "hetero/predicted_step_time_error": 0.1}
    assert found == {"hetero/total_batch_size": 8.0, **sizes, **predicted}
    assert found.keys() - predicted.keys() == plan_metrics(StepObservations.empty(2), PLAN, None, error=0.1).keys()


@pytest.mark.parametrize(("accumulation", "idle"), [(1, 0.6), (2, 0.2), (3, 0.0)])
def test_workers_are_idle_for_what_is_left_of_the_step(accumulation, idle):
    found = plan_metrics(steps([0.5] * 4), PLAN, None, accumulation)
    assert found["hetero/compute_time/rank0"] == pytest.approx(0.3)
    assert found["hetero/step_time"] == pytest.approx(0.5)
    assert found["hetero/idle_fraction"] == pytest.approx(idle)


def test_what_is_no_step_is_left_out_and_only_such_ones_give_no_step_time():
    assert plan_metrics(steps([0.5, math.nan, 0.5, math.nan]), PLAN, None)["hetero/step_time"] == 0.5
    assert "hetero/step_time" not in plan_metrics(steps([math.nan] * 4), PLAN, None)


def test_noise_is_told_as_it_is_known():
    running = RunningNoiseScale(horizon=1e6).update(trace=4.0, global_sq_norm=1.5, total_batch_size=8)
    found = noise_metrics(running)
    assert found["hetero/noise_scale"] == pytest.approx(found["hetero/grad_variance"] / found["hetero/grad_sq_norm"])
    assert all(math.isnan(value) for value in noise_metrics(RunningNoiseScale()).values())
