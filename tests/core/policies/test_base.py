"""Promises of every policy in the table, by simulated clusters."""

import json
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import NAMED, POLICIES
from lightning_hetero.core.policies.base import Decision, Proposal, load_planner
from lightning_hetero.core.policies.static import StaticPlanner
from tests.core.policies.simulated import (
    CLUSTER,
    FAST,
    SLOW,
    context,
    drive,
    even_plan,
    excess,
    learned,
)


@pytest.fixture(params=[name for name in NAMED if POLICIES[name].planner is not None])
def kind(request):
    return request.param


def test_state_is_plain_python_and_comes_back(kind):
    ctx = context(192, 3)
    planner = learned(kind, ctx)
    state = planner.state_dict()
    back = POLICIES[kind].factory().loaded(json.loads(json.dumps(state, allow_nan=False)))
    assert back.state_dict() == state
    assert back.initial(ctx) == planner.initial(ctx)
    nothing = POLICIES[kind].factory()
    assert nothing.loaded(json.loads(json.dumps(nothing.state_dict(), allow_nan=False))) == nothing


def test_state_follows_the_hardware_not_the_rank(kind):
    ctx = context(192, 3, capacities=(4.0, 2.0, 1.0))
    planner = POLICIES[kind].factory().loaded(learned(kind, ctx).state_dict())
    turned = replace(ctx, identities=ctx.identities[::-1], capacities=ctx.capacities[::-1])
    here, there = planner.initial(ctx), planner.initial(turned)
    assert there.plan.local_batch_sizes == here.plan.local_batch_sizes[::-1]
    assert here.plan.local_batch_sizes[0] > here.plan.local_batch_sizes[2]


def test_fewer_workers_are_planned_from_what_is_known(kind):
    ctx = context(192, 3)
    planner = POLICIES[kind].factory().loaded(learned(kind, ctx).state_dict())
    two = replace(context(100, 2), identities=("host-2", "host-0"))
    proposal = planner.initial(two)
    assert isinstance(proposal, Proposal)
    assert sum(proposal.plan.local_batch_sizes) == 100
    if kind != "static":
        fewer = replace(CLUSTER, nodes=(SLOW, FAST))
        assert excess(fewer, proposal.plan) <= 0.25


def test_no_observation_no_change(kind):
    ctx = context(192, 3)
    planner, proposal = POLICIES[kind].factory().decide(StepObservations.empty(3), even_plan(ctx), ctx)
    assert proposal is None
    assert planner.state_dict() == POLICIES[kind].factory().state_dict()


def test_sizes_sum_to_the_total_from_the_first_to_the_last(kind):
    rng = np.random.default_rng(3)
    for total in (3, 7, 192, 1001):
        ctx = context(total, 3)
        _, plan, _ = drive(POLICIES[kind].factory(), CLUSTER, even_plan(ctx), ctx, 4, rng, noise=0.2)
        assert sum(plan.local_batch_sizes) == total
        assert min(plan.local_batch_sizes) >= 1


PLAN = BatchPlan(16, (10, 6))


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        ((StaticPlanner(), PLAN), TypeError, "proposed BatchPlan"),
        (Decision(StaticPlanner(), Proposal((10, 6), "by hand")), TypeError, "its plan has to be a BatchPlan"),
        (Decision(StaticPlanner(), Proposal(PLAN, None)), TypeError, "its reason a string"),
        (Decision("static"), TypeError, "planner='static' lacks"),
        (Decision(StaticPlanner), TypeError, "planner=StaticPlanner is a class"),
        (Decision(StaticPlanner(), density=0.5), TypeError, "with density=0.5; give DensityChoice or None"),
        (Decision(StaticPlanner(), stale="yes"), TypeError, "with stale='yes'; give bool or None"),
        (Decision(StaticPlanner(), kept=42), TypeError, "with kept=42; give str or None"),
        (Decision(StaticPlanner(), error="small"), TypeError, "with error='small'"),
        (Decision(StaticPlanner(), soon=1), TypeError, "with soon=1"),
        (Decision(StaticPlanner(), Proposal(BatchPlan(24, (16, 8)), "more")), ValueError, "total batch from 16 to 24"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_told(outcome, error, words):
    with pytest.raises(error, match=re.escape(words)) as raised:
        Decision.of(outcome, StaticPlanner(), 16)
    assert "StaticPlanner" in str(raised.value)


def test_a_planner_that_changes_the_total_may():
    @dataclass(frozen=True)
    class Mover(StaticPlanner):
        moves_total: ClassVar[bool] = True

    decision = Decision(Mover(), Proposal(BatchPlan(24, (16, 8)), "more"))
    assert Decision.of(decision, Mover(), 16) is decision
    assert Decision.of((StaticPlanner(), Proposal(PLAN, "by hand")), StaticPlanner(), 16).proposal.plan == PLAN


def test_a_planner_that_is_lost_in_a_checkpoint_is_told():
    class Forgetful(StaticPlanner):
        def loaded(self, state):
            pass

    with pytest.raises(RuntimeError, match=r"loaded\(\) of Forgetful returned None"):
        load_planner(Forgetful(), {})
    assert load_planner(StaticPlanner(), {}) == StaticPlanner()


def test_a_planner_that_returns_something_else_is_told():
    for outcome in (None, (None, None, None)):
        with pytest.raises(TypeError, match=r"decide\(\) of a planner returned"):
            Decision.of(outcome)
