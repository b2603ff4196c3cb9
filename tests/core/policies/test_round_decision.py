"""Decision of a round: what is asked of the planner, and what is said of the running plan."""

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.round_decision import decide_round
from lightning_hetero.core.policies.static import StaticPlanner

OLD, NEW = BatchPlan(4, (2, 2)), BatchPlan(8, (6, 2))
SEEN = StepObservations(*[np.ones((3, 2))] * 7)


class Sure(StaticPlanner):
    """A step takes as many seconds as its plan has samples, give or take one."""

    def __init__(self, moves=False):
        self.moves_total = moves

    def decide(self, observations, current, context):
        return Decision(self, kept=f"{observations.num_steps} of {current.total_batch_size}", error=1.0)

    def predict(self, plan, context):
        conditions = context.total_batch_size, context.noise, context.epoch_begins
        assert conditions == (plan.total_batch_size, None, False)
        return float(plan.total_batch_size)


def context(**more):
    return lambda: PlanContext(8, ("a", "b"), (1, 1), **more)


def test_the_planner_decides_on_the_upcoming_plan_and_predicts_the_running_one():
    decision, predicted = decide_round(Sure(), SEEN, OLD, NEW, context())
    assert (decision.kept, predicted) == ("3 of 8", (4.0, None))
    assert decide_round(Sure(), SEEN, NEW, NEW, context())[1] == (8.0, 1.0)
    known = context(noise=RunningNoiseScale(), epoch_begins=True)
    assert decide_round(Sure(), SEEN, OLD, NEW, known)[1] == (4.0, None)


def test_no_planner_or_no_plan_has_nothing_to_decide():
    assert decide_round(None, SEEN, OLD, OLD, None) == (Decision(None), (None, None))
    planner = Sure()
    assert decide_round(planner, SEEN, None, None, None)[0].planner is planner


@pytest.mark.parametrize(
    ("moves", "begins", "asked"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_without_observations_only_a_new_epoch_asks_a_planner_that_moves_the_total(moves, begins, asked):
    decision, _ = decide_round(Sure(moves), StepObservations.empty(2), OLD, OLD, context(epoch_begins=begins))
    assert decision.kept == ("0 of 4" if asked else "too few observations: no timed step")


@pytest.mark.parametrize("total", [4, 8])
def test_the_total_that_has_to_stay_is_that_of_the_upcoming_plan(total):
    class Proposes(Sure):
        def decide(self, observations, current, context):
            return Decision(self, Proposal(BatchPlan(total, (total - 1, 1)), "better"))

    if total == NEW.total_batch_size:
        decision, _ = decide_round(Proposes(), SEEN, OLD, NEW, context())
        assert decision.proposal.plan.local_batch_sizes == (7, 1)
    else:
        with pytest.raises((RuntimeError, ValueError), match="total"):
            decide_round(Proposes(), SEEN, OLD, NEW, context())


@pytest.mark.parametrize(("running", "upcoming"), [(None, NEW), (OLD, None)])
def test_one_plan_that_is_missing_leaves_nothing_to_decide(running, upcoming):
    planner = Sure()
    assert decide_round(planner, SEEN, running, upcoming, None) == (Decision(planner), (None, None))


class Learner(Sure):
    """Makes way for another planner."""

    following = None

    def decide(self, observations, current, context):
        return Decision(self.following)


class Twice(StaticPlanner):
    """A step takes twice as many seconds as its plan has samples."""

    def predict(self, plan, context):
        return 2.0 * plan.total_batch_size


@pytest.mark.parametrize(("following", "predicted"), [(None, 8.0), (Twice(), 16.0)])
def test_the_planner_that_follows_predicts_or_else_the_one_that_decided(following, predicted):
    planner = Learner()
    planner.following = following
    assert decide_round(planner, SEEN, NEW, NEW, context())[1] == (predicted, None)
