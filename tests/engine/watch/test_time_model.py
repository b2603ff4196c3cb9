"""The time model of a run is the policy's own, or one that only watches."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.engine.watch.time_model import TimeModelWatch

CONTEXT = PlanContext(40, ("a", "b"), (1, 1))
SIZES = np.array([[24.0, 16.0]] * 20)
ZEROS = np.zeros_like(SIZES)
BACKWARD = SIZES * [0.001, 0.003]
SEEN = StepObservations(SIZES, ZEROS, BACKWARD, ZEROS, ZEROS, ZEROS, ZEROS + BACKWARD.max())
PLAN = BatchPlan(40, (24, 16))


@pytest.mark.parametrize("planner", [None, ProportionalPlanner(), PerfModelPlanner(), GoodputPlanner(400, model=None)])
def test_equal_sizes_are_predicted_whatever_the_policy(planner):
    if isinstance(planner, GoodputPlanner):
        planner = GoodputPlanner(400, model=PerfModelPlanner().observe(SEEN, CONTEXT))
    elif isinstance(planner, PerfModelPlanner):
        planner = planner.observe(SEEN, CONTEXT)
    known = TimeModelWatch().observe(planner, SEEN, PLAN, CONTEXT)
    assert known.even == pytest.approx(0.06, rel=0.05)
    assert np.array(known.model["nodes"])[:, 2] == pytest.approx([0.001, 0.003], rel=0.05)
    assert math.isfinite(known.running) == (planner is None or isinstance(planner, ProportionalPlanner))


def test_the_fields_of_a_record_are_those_of_the_model():
    """Also where the policy plans for another total by now: what is predicted is of the plan that ran."""
    random = np.random.default_rng(0)
    first, sync, last = (random.uniform(0.9, 1.1, SIZES.shape) * value for value in (0.004, 0.02, 0.008))
    values = StepObservations(SIZES, 0.5 * BACKWARD, BACKWARD, first, sync, last, ZEROS + 0.09)
    context = replace(CONTEXT, total_batch_size=80)
    model = PerfModelPlanner().observe(values, context)
    known, cluster = TimeModelWatch().observe(None, values, PLAN, context), model.cluster(context)
    assert known.model["nodes"] == tuple(tuple(row) for row in cluster.array.tolist())
    assert [known.model[name] for name in ("gamma", "t_o", "t_u")] == [cluster.gamma, cluster.t_o, cluster.t_u]
    assert known.running == pytest.approx(model.predict(PLAN, context))
    assert known.error == pytest.approx(model.error(PLAN, context))
    assert known.even == pytest.approx(model.predict(BatchPlan(40, (20, 20)), context))
    assert len({known.even, known.running, known.error, *(known.model[name] for name in ("gamma", "t_o", "t_u"))}) == 6


def test_the_model_of_a_record_is_that_of_all_micro_batches():
    """Three of them take three times as long, and their report compares them with the measured step."""
    context = replace(CONTEXT, accumulation=3)
    seen = replace(SEEN, forward=BACKWARD, step_time=SEEN.step_time * 6)
    known = TimeModelWatch().observe(None, seen, PLAN, context)
    link = [known.model[name] for name in ("gamma", "t_o", "t_u")]
    cluster = ClusterTimeModel(NodeModels(np.array(known.model["nodes"])), *link)
    assert cluster.step_time(PLAN.local_batch_sizes) == pytest.approx(6 * BACKWARD.max(), rel=0.05)


def test_the_watching_model_keeps_what_it_has_learned():
    """Times of two splits tell the fixed part of a step, which those of one do not."""
    watch, backward = TimeModelWatch(), BACKWARD + 0.03
    sizes = SIZES[:, ::-1]
    other = StepObservations(sizes, ZEROS, sizes * [0.001, 0.003] + 0.03, ZEROS, ZEROS, ZEROS, ZEROS + 0.102)
    for _ in range(3):
        watch.observe(None, other, BatchPlan(40, (16, 24)), CONTEXT)
    seen = StepObservations(SIZES, ZEROS, backward, ZEROS, ZEROS, ZEROS, ZEROS + backward.max())
    assert watch.observe(None, seen, PLAN, CONTEXT).even == pytest.approx(0.09, rel=0.01)
    assert TimeModelWatch().observe(None, seen, PLAN, CONTEXT).even != pytest.approx(0.09, rel=0.01)


def test_the_watching_model_learns_from_round_to_round():
    watch = TimeModelWatch()
    watch.observe(None, SEEN, PLAN, CONTEXT)
    other = StepObservations(SIZES[:, ::-1], ZEROS, 2 * BACKWARD[:, ::-1], ZEROS, ZEROS, ZEROS, ZEROS + 0.1)
    first = watch.observe(None, SEEN, PLAN, CONTEXT).even
    for _ in range(5):
        last = watch.observe(None, other, BatchPlan(40, (16, 24)), CONTEXT).even
    assert abs(last - first) > 0.005


def test_nothing_is_known_before_the_first_steps():
    known = TimeModelWatch().observe(None, StepObservations.empty(2), PLAN, CONTEXT)
    assert math.isnan(known.even)
    assert known.model == {}
