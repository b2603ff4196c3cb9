"""Of a round in which a worker's speed changed, only the steps since then tell what it takes now."""

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.newest_speed import DEVIATIONS, MIN_CHANGE, MIN_STEPS, since_change
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner

EVEN, CONTEXT = BatchPlan(32, (16, 16)), PlanContext(32, ("a", "b"), (1, 1), elapsed=100)


def seen(factors, *, noise=0.0, seed=0, sizes=(8, 8), phase="forward"):
    """Steps of two workers, of which the first takes these multiples of its time."""
    factors = np.asarray(factors, dtype=float)
    draw = np.random.default_rng(seed)
    compute = 0.015 * np.exp(noise * draw.standard_normal((len(factors), 2)))
    slow = np.stack([0.015 * (factors - 1), np.zeros(len(factors))], axis=1)
    zeros = np.zeros_like(compute)
    parts = {"forward": 0.97 * compute, "backward": 0.03 * compute}
    parts[phase] = parts[phase] + slow
    total = parts["forward"] + parts["backward"]
    step = zeros + total.max(axis=1, keepdims=True) + 0.001
    return StepObservations(zeros + sizes, parts["forward"], parts["backward"], zeros, zeros, step - total, step)


@pytest.mark.parametrize("slow", range(MIN_STEPS, 32 - MIN_STEPS + 1))
def test_steps_before_the_change_are_left_out(slow):
    for factors in ([3.0] * slow + [1.0] * (32 - slow), [1.0] * slow + [3.0] * (32 - slow)):
        assert since_change(seen(factors, noise=0.03, seed=slow)).num_steps == 32 - slow


def test_the_newest_of_several_changes_counts():
    assert since_change(seen([1.0] * 10 + [4.0] * 10 + [1.0] * 12, noise=0.02)).num_steps == 12
    two = seen([3.0] * 20 + [1.0] * 12)
    other = seen([1.0] * 12 + [3.0] * 20)
    both = StepObservations(
        *(np.stack([x[:, 0], y[:, 0]], axis=1) for x, y in zip(fields(two), fields(other), strict=True))
    )
    assert since_change(both).num_steps == 12


def fields(observations):
    return [getattr(observations, name) for name in StepObservations.FIELDS]


def test_noise_bursts_and_drift_are_no_change():
    draw, cut = np.random.default_rng(1), 0
    for seed in range(300):
        bursts = np.where(draw.random(32) < 0.1, draw.uniform(2.0, 6.0, 32), 1.0)
        drift = np.exp(np.cumsum(0.005 * draw.standard_normal(32)))
        quota = np.where(np.arange(32) % 5 == 0, 5.0, 1.0)
        for factors in (np.ones(32), bursts, drift, quota):
            cut += since_change(seen(factors, noise=0.15, seed=seed)).num_steps < 32
    assert cut <= 12, "of 1,200"


def test_a_change_is_large_beside_the_step_and_beside_the_noise():
    def cut(factor, noise=0.0):
        return since_change(seen([1.0] * 16 + [factor] * 16, noise=noise, seed=3)).num_steps == 16

    assert [cut(1.0 + share * MIN_CHANGE) for share in (0.95, 1.05)] == [False, True]
    assert cut(1.6, noise=0.02)
    assert not cut(1.6, noise=0.8 / DEVIATIONS)


def test_a_single_odd_step_does_not_hide_a_change():
    odd = [3.0] * 20 + [1.0] * 12
    odd[28] = 20.0
    assert since_change(seen(odd)).num_steps == 12


def test_as_few_steps_as_possible_show_a_change():
    assert since_change(seen([3.0] * MIN_STEPS + [1.0] * MIN_STEPS)).num_steps == MIN_STEPS


def test_few_steps_are_kept_as_they_are():
    short = seen([3.0] * MIN_STEPS + [1.0] * (MIN_STEPS - 1))
    assert since_change(short) is short
    assert since_change(StepObservations.empty(3)).num_steps == 0


def test_steps_of_an_earlier_plan_stay_unless_the_speed_changed_since():
    sizes = np.array([[4, 12]] * 10 + [[8, 8]] * 22)
    other = seen([1.0] * 10 + [2.0] * 22, sizes=sizes)
    assert since_change(other) is other, "another size, not another speed"
    assert since_change(seen([1.0] * 20 + [3.0] * 12, sizes=sizes)).num_steps == 12


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("slow", [8, 12, 16, 20, 24])
def test_a_disturbance_that_is_over_does_not_move_the_split(phase, slow):
    """The backward pass, slowed down thirtyfold for some steps, made the next plan 31/1."""
    first = PerfModelPlanner().decide(seen(np.ones(5), sizes=(16, 16)), EVEN, CONTEXT)
    over = seen([3.0] * slow + [1.0] * (32 - slow), noise=0.02, sizes=(16, 16), phase=phase)
    done = first.planner.decide(over, EVEN, CONTEXT)
    assert done.proposal is None, done.proposal
    assert done.planner.predict(EVEN, CONTEXT) == pytest.approx(0.016, rel=0.05)


def test_a_worker_that_became_slow_within_a_round_is_relieved_at_once():
    first = PerfModelPlanner().decide(seen(np.ones(5), sizes=(16, 16)), EVEN, CONTEXT)
    now = seen([1.0] * 20 + [3.0] * 12, noise=0.02, sizes=(16, 16))
    assert first.planner.decide(now, EVEN, CONTEXT).proposal.plan.local_batch_sizes[0] <= 10
