"""Rounds of a simulation: decisions ahead of the batches that are drawn, and what is noted of each round."""

import numpy as np
import pytest

from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, Leave, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner

DEVICES = [DeviceProfile(0.3e-3 / v, 0.01, 0.7e-3 / v, 0.01) for v in (1.0, 0.5, 0.2)]


class Restless(StaticPlanner):
    """Moves a sample in each round, and says that a step takes as many seconds as the first worker has samples."""

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        first, second, third = current.local_batch_sizes
        plan = BatchPlan(current.total_batch_size, (first + 1, second - 1, third))
        return Decision(self, Proposal(plan, "onwards"), error=0.5)

    def predict(self, plan, context):
        return float(plan.local_batch_sizes[0])


@pytest.mark.parametrize("ahead", [0, 1, 5, 9])
def test_each_plan_runs_from_its_step_to_the_next(ahead):
    result = ClusterSimulator(DEVICES, 300, policy=Restless(), replan=4, ahead=ahead).run(60)
    assert [entry.step for entry in result.plans[1:]] == [step + ahead for step in range(4, 61, 4)]
    ends = [*(entry.step for entry in result.plans[1:]), 10**9]
    for entry, end in zip(result.plans, ends, strict=True):
        own = result.sizes[entry.step : end]
        assert (own == entry.plan.local_batch_sizes).all()


@pytest.mark.parametrize("ahead", [0, 3, 4])
def test_a_round_says_what_is_predicted_of_the_plan_that_runs(ahead):
    result = ClusterSimulator(DEVICES, 300, policy=Restless(), replan=4, ahead=ahead).run(60)
    for round_ in result.rounds:
        assert round_.predicted == result.sizes[round_.step - 1, 0]
        newest = [entry.plan.local_batch_sizes for entry in result.plans if entry.step < round_.step + ahead][-1]
        assert round_.error == (0.5 if newest[0] == round_.predicted else None)


@pytest.mark.parametrize("ahead", [0, 6])
def test_the_schedule_knows_of_the_steps_that_are_drawn(ahead, monkeypatch):
    asked, after = [], SyncSchedule.after

    def noted(self, *arguments, ahead=0):
        asked.append(ahead)
        return after(self, *arguments, ahead=ahead)

    monkeypatch.setattr(SyncSchedule, "after", noted)
    ClusterSimulator(DEVICES, 300, ahead=ahead).run(60)
    assert asked
    assert set(asked) == {ahead}


def test_a_recording_sees_all_rounds_and_changes_nothing():
    settings = {"link": LinkProfile(25e6, 1.25e9), "events": [Leave(50, "device 2")], "seed": 1}
    plain = ClusterSimulator(DEVICES, 300, policy=PerfModelPlanner(), **settings).run(90)
    recording = RecordingPlanner(PerfModelPlanner())
    result = ClusterSimulator(DEVICES, 300, policy=recording, **settings).run(90)
    assert result.plans == plain.plans
    assert [r.predicted for r in result.rounds] == [r.predicted for r in plain.rounds]
    assert len(recording.log) == len(result.rounds)
    assert all(step > 0 for step in np.diff([r.step for r in result.rounds]))


class Counting(StaticPlanner):
    """Counts rounds, of which a checkpoint keeps half."""

    def __init__(self, rounds=0):
        self.rounds = rounds

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        return Decision(Counting(self.rounds + 1))

    def state_dict(self):
        return {"rounds": self.rounds // 2}

    def loaded(self, state):
        return Counting(state["rounds"])


def test_a_restart_knows_what_a_checkpoint_keeps():
    simulator = ClusterSimulator(DEVICES, 300, policy=Counting(), replan=10, events=[Leave(45, "device 2")])
    simulator.run(45)
    assert simulator.planner.rounds == 4
    simulator.run(6)
    assert simulator.planner.rounds == 2
