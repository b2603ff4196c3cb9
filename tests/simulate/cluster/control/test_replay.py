"""The same decisions on the same observations: rounds of a real run, of two processes, through the simulator's path."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner, replay
from tests.helpers import run_ranks

STEPS = 60


def _trains(rank, policy, replan):
    """A run whose second rank is three times as slow; its rounds, its plans, and how its schedule was asked."""
    dist.init_process_group("gloo")
    asked, after = [], SyncSchedule.after

    def noted(self, step, observations, cost, decision, *, ahead=0):
        following = after(self, step, observations, cost, decision, ahead=ahead)
        asked.append((step, cost, ahead, following))
        return following

    SyncSchedule.after = noted
    engine = HeteroEngine(
        HeteroConfig(hysteresis=0.01, replan=replan), rank=rank, world_size=2, device=torch.device("cpu")
    )
    first = planner = RecordingPlanner(POLICIES[policy].factory())
    engine.shard(PermutationStream(STEPS * 40, shuffle=False, seed=0), batch_size=20, planner=planner)
    for step in range(STEPS):
        size = engine.begin_step(0, step)
        time.sleep(1e-4 * size * (1 + 2 * rank))
        with engine.backward():
            time.sleep(2e-4 * size * (1 + 2 * rank))
            ready = engine.observer.bucket_ready()
            dist.all_reduce(torch.zeros(4))
            engine.observer.bucket_done(ready)
        engine.end_step()
        if engine.sync_due:
            planner = engine.exchange(planner, not_before=(0, step + 1)).planner
    return first.log, engine.plan_history, asked


@pytest.mark.parametrize(("policy", "replan"), [("perf_model", "auto"), ("perf_model", 8), ("pid", 8)])
def test_a_real_run_decides_as_the_simulator_does(policy, replan):
    log, history, asked = run_ranks(_trains, 2, policy, replan)[0]
    assert len(log) >= (1 if replan == "auto" else 7)  # "auto" has fewer where the machine is busy
    assert len(history) >= 2
    plans = replay(log, POLICIES[policy].factory())
    assert [entry.plan for entry in plans] == [entry.plan for entry in history]
    assert [entry.step for entry in plans[1:]] == [entry.step for entry in history[1:]]
    assert plans[0].plan.local_batch_sizes == (20, 20)
    schedule = SyncSchedule(replan)
    for (step, cost, ahead, following), seen in zip(asked, log, strict=True):
        assert schedule.due(step)
        assert seen.context.elapsed == step - schedule.last
        schedule.done(step, schedule.after(step, seen.observations, cost, seen.decision, ahead=ahead))
        assert schedule.next == following


DEVICES = [DeviceProfile(0.3e-3 / v, 0.01, 0.7e-3 / v, 0.01, jitter=0.05) for v in (1.0, 0.5, 0.2)]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("policy", ["perf_model", "pid"])
def test_a_simulation_decides_again_as_it_did(policy, ahead):
    recording = RecordingPlanner(POLICIES[policy].factory())
    link = LinkProfile(gradient_bytes=1e7, rate=1e9)
    result = ClusterSimulator(DEVICES, 200, link=link, policy=recording, ahead=ahead, seed=2).run(100)
    again = replay(recording.log, POLICIES[policy].factory())
    assert [entry.plan for entry in again] == [entry.plan for entry in result.plans]
    assert [seen.decision.kept for seen in recording.log] == [r.kept for r in result.rounds]


def test_another_planner_or_other_conditions_are_not_the_run():
    recording = RecordingPlanner(POLICIES["perf_model"].factory())
    ClusterSimulator(DEVICES, 200, policy=recording).run(60)
    with pytest.raises(ValueError, match="round 1 of the run decided on"):
        replay(recording.log, None)
    other = replace(recording.log[0], context=replace(recording.log[0].context, total_batch_size=201))
    with pytest.raises(ValueError, match="round 0 of the run decided on"):
        replay([other], POLICIES["perf_model"].factory())
    first, second, *_ = recording.log
    other = replace(second, context=replace(second.context, hysteresis=0.3))
    with pytest.raises(ValueError, match="round 1 of the run decided on"):
        replay([first, other], POLICIES["perf_model"].factory())


def test_nothing_recorded_is_no_plan():
    assert replay([], None) == ()
