"""The same decisions on the same observations: rounds of a real run, of two processes, through the simulator's path."""

import pytest

from lightning_hetero.core.policies import POLICIES
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner, replay

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
