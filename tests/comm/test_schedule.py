"""When ranks look at their plan next: what looking costs, what somebody waits for, and soon again after a stall."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero import engine as module
from lightning_hetero.comm.schedule import FIRST, LONGEST, ExchangeSchedule
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.plan import BatchPlan
from lightning_hetero.core.planner import Decision, Proposal, StaticPlanner
from lightning_hetero.data import PermutationStream

ZEROS = np.zeros((4, 2))
STEPS_OF_ONE_SECOND = StepObservations(*[ZEROS] * 6, ZEROS + 1.0)


@pytest.mark.parametrize(
    ("cost", "changed", "waits", "steps"),
    [
        (0.001, False, False, FIRST),
        (0.001, True, False, FIRST + 2),
        (0.2, False, False, 40),
        (0.2, True, False, 40),
        (99.0, False, False, LONGEST),
        (0.2, False, True, FIRST),
        (99.0, True, True, FIRST + 2),
    ],
)
def test_looking_costs_half_a_percent_unless_a_decision_waits_for_it(cost, changed, waits, steps):
    schedule = ExchangeSchedule("auto")
    assert schedule.after(100, STEPS_OF_ONE_SECOND, cost, changed=changed, waits=waits) == 100 + steps


@pytest.mark.parametrize("waits", [False, True])
def test_an_interval_of_the_users_is_kept(waits):
    assert ExchangeSchedule(50).after(100, STEPS_OF_ONE_SECOND, 99.0, changed=True, waits=waits) == 150
    assert ExchangeSchedule("epoch").after(100, STEPS_OF_ONE_SECOND, 99.0, changed=True, waits=waits) > 2**60


def test_a_link_that_stalls_in_one_look_does_not_put_off_the_next_ones():
    def steps_between(*costs):
        schedule = ExchangeSchedule("auto")
        return [schedule.after(0, STEPS_OF_ONE_SECOND, cost, changed=False) for cost in costs]

    assert steps_between(0.2, 99.0, 0.2, 0.2) == [40] * 4
    assert steps_between(0.2, 99.0, 99.0) == [40, 40, LONGEST], "a link that stays slow counts"


@dataclass(frozen=True)
class Asks(StaticPlanner):
    """Has nothing to decide; may have asked for messages of another size, or for a look as early as it can be."""

    probe: float | None = None
    soon: bool = False
    proposal: Proposal | None = None

    def decide(self, observations, current, context):
        return Decision(self, self.proposal, probe=self.probe, soon=self.soon)


@pytest.mark.parametrize(
    ("asks", "steps"),
    [
        (Asks(), LONGEST),
        (Asks(probe=0.01), FIRST),
        (Asks(soon=True), FIRST),
        (Asks(soon=True, proposal=Proposal(BatchPlan(3, (3,)), "smaller")), FIRST + 2),
    ],
    ids=["nothing to be seen", "messages to be timed", "a better split may follow", "a split that is another"],
)
def test_ranks_look_soon_at_what_a_decision_waits_for(monkeypatch, asks, steps):
    """A look takes a thousand counted seconds, too much for such steps, but not if a decision waits for it."""
    engine = module.HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(400, shuffle=False, seed=0), batch_size=4)
    for step in range(8):
        engine.begin_step(0, step)
        with engine.backward():
            engine.observer.bucket_done(engine.observer.bucket_ready())
        engine.end_step()
    assert engine.due
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count(step=1000.0).__next__))
    done = engine.exchange(asks, not_before=(0, 8))
    assert done.observations.num_steps > 1
    assert engine.schedule.next == 8 + steps


@dataclass(frozen=True)
class Ages(StaticPlanner):
    """Notes the steps that have passed, as a planner of the time model does."""

    seen: tuple = ()

    def decide(self, observations, current, context):
        return Decision(Ages(seen=(*self.seen, (observations.num_steps, context.elapsed))))


def test_a_planner_is_told_of_the_steps_that_have_passed_not_only_of_those_observed():
    engine = module.HeteroEngine(HeteroConfig(replan=60), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    planner = Ages()
    for step in range(120):
        engine.begin_step(0, step)
        with engine.backward():
            engine.observer.bucket_done(engine.observer.bucket_ready())
        engine.end_step()
        if engine.due:
            planner = engine.exchange(planner, not_before=(0, step + 1)).planner
    assert planner.seen == ((32, 60), (32, 60))
