"""The time model of a run is the policy's own, or one that only watches."""

import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
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
    assert ("predicted" in known.model) == (planner is None or isinstance(planner, ProportionalPlanner))


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
