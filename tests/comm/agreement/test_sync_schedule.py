"""When ranks look at their plan next: what looking costs, what somebody waits for, and soon again after a stall."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from lightning_hetero.comm.agreement.sync_schedule import SETTINGS, SyncSchedule
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine, sync_rounds

FIRST, LONGEST, WALKING = SETTINGS.min_steps, SETTINGS.max_steps, SETTINGS.min_steps_moving
ZEROS = np.zeros((4, 2))
STEPS_OF_ONE_SECOND = StepObservations(*[ZEROS] * 6, ZEROS + 1.0)


OTHER = Proposal(BatchPlan(3, (3,)), "smaller")


@pytest.mark.parametrize(
    ("cost", "decision", "steps"),
    [
        (0.001, {}, FIRST),
        (0.001, {"proposal": OTHER}, FIRST + 1),
        (0.2, {}, 40),
        (0.2, {"proposal": OTHER}, 41),
        (99.0, {}, LONGEST),
        (0.2, {"soon": True}, FIRST),
        (99.0, {"soon": True, "proposal": OTHER}, FIRST + 1),
        (0.001, {"moving": True}, WALKING),
        (0.001, {"moving": True, "proposal": OTHER, "soon": True}, WALKING + 1),
        (0.03, {"moving": True}, 6),
        (0.2, {"moving": True}, 40),
        (0.2, {"moving": True, "soon": True}, FIRST),
    ],
)
def test_looking_costs_half_a_percent_unless_a_decision_waits_for_it(cost, decision, steps):
    """Where speeds walk, looks come every four steps if they are as cheap as that."""
    schedule = SyncSchedule("auto")
    assert schedule.after(100, STEPS_OF_ONE_SECOND, cost, Decision(None, **decision)) == 100 + steps


@pytest.mark.parametrize("moving", [False, True])
def test_where_no_step_was_timed_the_next_look_comes_after_eight(moving):
    assert SyncSchedule("auto").after(100, StepObservations.empty(2), 99.0, Decision(None, moving=moving)) == 108


def test_a_step_that_stalls_does_not_make_looks_cheap_and_parts_of_a_step_count():
    times = np.array([[1.0, 1.0]] * 3 + [[90.0, 90.0]])
    seen = StepObservations(*[ZEROS] * 6, times)
    assert SyncSchedule("auto").after(100, seen, 0.2, Decision(None)) == 140
    assert SyncSchedule("auto").after(100, seen, 0.201, Decision(None)) == 141


@pytest.mark.parametrize(
    ("cost", "decision", "steps"),
    [
        (99.0, {"soon": True, "proposal": OTHER}, FIRST + 6 + 1),
        (99.0, {"soon": True}, FIRST),
        (0.05, {"soon": True, "proposal": OTHER}, 11),
        (0.001, {"soon": True, "proposal": OTHER}, FIRST + 1),
        (0.001, {"moving": True, "proposal": OTHER}, WALKING + 1),
        (99.0, {"proposal": OTHER}, LONGEST + 1),
    ],
)
def test_a_dear_look_that_waits_for_a_new_plan_comes_when_eight_of_its_steps_have_run(cost, decision, steps):
    """Loader workers have drawn six steps ahead; looks that pay for themselves come as often as otherwise."""
    following = SyncSchedule("auto").after(100, STEPS_OF_ONE_SECOND, cost, Decision(None, **decision), ahead=6)
    assert following == 100 + steps


@pytest.mark.parametrize("replan", ["auto", 4])
def test_an_epoch_begins_with_a_look_if_eight_steps_have_passed_since_the_last_one_that_may_do_as_much(replan):
    """As much: change the number of micro-batches, which no look within an epoch may."""
    schedule = SyncSchedule(replan)
    assert [step for step in range(20) if schedule.due_at_epoch(step)] == list(range(8, 20))
    for step in (8, 12, 16):
        schedule.done(step, step + 4)
    assert not schedule.due_at_epoch(23)
    assert schedule.due_at_epoch(24)
    assert schedule.due_at_epoch(16, micro_batches_move=True)
    schedule.done(16, 20, between_epochs=True)
    schedule.done(20, 24)
    assert not schedule.due_at_epoch(23, micro_batches_move=True)
    assert schedule.due_at_epoch(24, micro_batches_move=True)
    assert SyncSchedule("epoch").due_at_epoch(0, micro_batches_move=True)


@pytest.mark.parametrize("decision", [Decision(None), Decision(None, OTHER, soon=True, moving=True)])
def test_an_interval_of_the_users_is_kept(decision):
    assert SyncSchedule(50).after(100, STEPS_OF_ONE_SECOND, 99.0, decision) == 150
    assert SyncSchedule("epoch").after(100, STEPS_OF_ONE_SECOND, 99.0, decision) > 2**60


def test_a_link_that_stalls_in_one_look_does_not_put_off_the_next_ones():
    def steps_between(*costs):
        schedule = SyncSchedule("auto")
        return [schedule.after(0, STEPS_OF_ONE_SECOND, cost, Decision(None)) for cost in costs]

    assert steps_between(0.2, 99.0, 0.2, 0.2) == [40] * 4
    assert steps_between(0.2, 99.0, 99.0) == [40, 40, LONGEST], "a link that stays slow counts"


def alone(**config):
    """An engine of one worker, at its first step."""
    engine = HeteroEngine(HeteroConfig(**config), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    return engine


def train(engine, step):
    engine.begin_step(0, step)
    with engine.backward():
        engine.observer.bucket_done(engine.observer.bucket_ready())
    engine.end_step()


@dataclass(frozen=True)
class Asks(StaticPlanner):
    """Has nothing to decide; may have asked for an early look, or for more of them."""

    moves_total: ClassVar[bool] = True

    soon: bool = False
    moving: bool = False
    proposal: Proposal | None = None

    def decide(self, observations, current, context):
        return Decision(self, self.proposal, soon=self.soon, moving=self.moving)


@pytest.mark.parametrize(
    ("asks", "steps"),
    [
        (Asks(), LONGEST),
        (Asks(soon=True), FIRST),
        (Asks(soon=True, proposal=OTHER), FIRST + 1),
        (Asks(moving=True), LONGEST),
    ],
    ids=["nothing to be seen", "a better split may follow", "another split", "too dear"],
)
def test_ranks_look_soon_at_what_a_decision_waits_for(monkeypatch, asks, steps):
    """A look takes a thousand counted seconds, too much for such steps, but not if a decision waits for it."""
    engine = alone()
    for step in range(8):
        train(engine, step)
    assert engine.sync_due
    monkeypatch.setattr(sync_rounds, "time", SimpleNamespace(perf_counter=itertools.count(step=1000.0).__next__))
    done = engine.exchange(asks, not_before=(0, 8))
    assert done.observations.num_steps > 1
    assert engine.rounds.schedule.next == 8 + steps


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_wait_for_the_steps_of_a_plan_that_is_still_to_come(monkeypatch, accumulation):
    """Sixteen micro-batches were drawn ahead when a look, too dear to come often, changed the split."""
    engine = alone()
    engine.rounds.accumulate(accumulation)
    for step in range(8):
        train(engine, step)
    engine.sampler.drawn = (0, 24)
    monkeypatch.setattr(sync_rounds, "time", SimpleNamespace(perf_counter=itertools.count(step=1000.0).__next__))
    same = Proposal(BatchPlan(4, (4,)), "as it is")
    done = engine.exchange(Asks(soon=True, proposal=same), not_before=(0, 8))
    assert done.entry.step == 24
    assert engine.rounds.schedule.next == 8 + 16 // accumulation + FIRST + 1


@pytest.mark.parametrize("moving", [False, True])
def test_ranks_look_twice_as_often_where_speeds_walk(monkeypatch, moving):
    engine = alone()
    monkeypatch.setattr(sync_rounds, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    looks = []
    for step in range(24):
        train(engine, step)
        if engine.sync_due:
            engine.exchange(Asks(moving=moving), not_before=(0, step + 1))
            looks.append(step + 1)
    assert looks == ([8, 12, 16, 20, 24] if moving else [8, 16, 24])


@dataclass(frozen=True)
class Ages(StaticPlanner):
    """Notes the steps that have passed, as a planner of the time model does."""

    seen: tuple = ()

    def decide(self, observations, current, context):
        return Decision(Ages(seen=(*self.seen, (observations.num_steps, context.elapsed))))


def test_a_planner_is_told_of_the_steps_that_have_passed_not_only_of_those_observed():
    engine = alone(replan=60)
    planner = Ages()
    for step in range(120):
        train(engine, step)
        if engine.sync_due:
            planner = engine.exchange(planner, not_before=(0, step + 1)).planner
    assert planner.seen == ((32, 60), (32, 60))
