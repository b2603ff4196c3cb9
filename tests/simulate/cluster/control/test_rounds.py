"""Rounds of a simulation: decisions ahead of the batches that are drawn, and what is noted of each round."""

import re

import numpy as np
import pytest

from lightning_hetero.comm.agreement.plan_log import SplitLog
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


def test_rounds_take_what_a_function_makes_of_the_time_of_the_decision():
    given = []
    result = ClusterSimulator(DEVICES, 300, replan=8, round_seconds=lambda taken: given.append(taken) or 0.25).run(40)
    assert [round_.decision_seconds for round_ in result.rounds] == given
    assert [round_.seconds for round_ in result.rounds] == [0.25] * 5
    before = [sum(0.25 for round_ in result.rounds if round_.step <= t) for t in range(40)]
    np.testing.assert_allclose(result.clock, np.cumsum(result.seconds) + before)


@pytest.mark.parametrize(("workers", "kept"), [(8, 32), (4000, 16)])
def test_rounds_of_many_workers_see_fewer_steps_of_each(workers, kept):
    planner, devices = RecordingPlanner(PerfModelPlanner()), [DeviceProfile(1e-3, 0.0, 2e-3, 0.0)] * workers
    ClusterSimulator(devices, 2 * workers, policy=planner, replan=40).run(40)
    assert [entry.observations.num_steps for entry in planner.log] == [kept]


def test_the_prediction_of_the_time_model_is_near_the_step():
    result = ClusterSimulator(DEVICES, 300, link=LinkProfile(25e6, 1.25e9)).run(100)
    last = result.rounds[-1]
    assert last.predicted == pytest.approx(result.exact[last.step - 1], rel=0.01)
    assert last.error < 0.1 * last.predicted


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


def test_peak_speeds_decide_where_the_policy_is_static():
    result = ClusterSimulator(DEVICES, 300, policy="static", capacities=(3.0, 2.0, 1.0)).run(3)
    assert result.sizes.tolist() == [[150, 100, 50]] * 3


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


def test_a_round_may_be_held_whenever_the_driver_wants():
    recording = RecordingPlanner(Counting())
    simulator = ClusterSimulator(DEVICES, 300, policy=recording, replan="epoch", round_seconds=0.25)
    simulator.advance(30)
    assert recording.log == []
    simulator.sync_round()
    simulator.advance(7)
    simulator.sync_round(unseen=500)
    assert [(seen.observations.num_steps, seen.context.elapsed) for seen in recording.log] == [(27, 30), (7, 507)]
    result = simulator.run(1)
    assert [round_.step for round_ in result.rounds] == [30, 37]
    assert result.clock[-1] == pytest.approx(result.seconds.sum() + 0.5)
    with pytest.raises(ValueError, match="unseen=-1"):
        simulator.sync_round(unseen=-1)


def test_a_round_out_of_turn_moves_the_next_one():
    simulator = ClusterSimulator(DEVICES, 300, policy=Counting(), replan=10)
    simulator.advance(15)
    simulator.sync_round()
    assert [round_.step for round_ in simulator.run(20).rounds] == [10, 15, 25, 35]


def said(caplog, scale, jitter, seed, **settings):
    """Result of 200 steps of three workers that hardly differ, and what a log says of a split that stays."""
    devices = [
        DeviceProfile(scale * 0.35e-3 / v, scale * 0.01, scale * 0.65e-3 / v, scale * 0.01, jitter=jitter)
        for v in (1.0, 0.9, 0.85)
    ]
    result, log = ClusterSimulator(devices, 60, seed=seed, replan=8, **settings).run(200), SplitLog(speaks=True)
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning_hetero"):
        for round_ in result.rounds:
            log.note_kept(Decision(None, kept=round_.kept))
    return result, caplog.messages


@pytest.mark.parametrize("seed", range(4))
def test_a_log_says_of_noisy_steps_by_how_much_they_vary(caplog, seed):
    """Each time varies by 25 %, and the longest of a round count less: that of a step by 14 to 18."""
    result, messages = said(caplog, 2.0, 0.25, seed)
    kinds = [message.split(": ")[1] for message in messages]
    assert "too little is known of the workers yet" in kinds
    assert all(one != next_ for one, next_ in zip(kinds, kinds[1:], strict=False))
    assert len(kinds) < len(result.rounds) / 3
    assert not any("too short" in text for text in messages), "of 87 ms"
    late = [round_.kept for round_ in result.rounds if round_.step > 40 and "beyond luck" in (round_.kept or "")]
    assert late
    for text in late:
        low, high = re.search(r"vary by ([\d.]+)%(?: to ([\d.]+)%)?,", text).groups()
        assert 12 <= float(low) <= float(high or low) <= 21


@pytest.mark.parametrize(("jitter", "settings"), [(0.3, {}), (0.01, {"change_cost": 0.08})], ids=["noise", "cost"])
def test_a_log_says_that_steps_are_too_short(caplog, jitter, settings):
    """And how long they take; nothing of the kind of the same workers in steps that take a hundred times as long."""
    result, messages = said(caplog, 0.02, jitter, 2, **settings)
    short = [message for message in messages if "too short" in message]
    assert short
    for text in short:
        found = re.match(r"the split stays: steps are too short to balance: they take ([\d.]+) ms, ", text)
        assert float(found.group(1)) == pytest.approx(1e3 * result.exact[0], abs=0.2)
    longer, others = said(caplog, 2.0, jitter, 2, **settings)
    assert longer.exact[0] == pytest.approx(100 * result.exact[0])
    assert not any("too short" in message for message in others)
