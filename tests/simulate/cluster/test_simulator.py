"""Simulations of whole trainings: what always holds, and what a run of them says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner


def cluster(speeds, **more):
    return [DeviceProfile(0.35e-3 / v, 0.01, 0.65e-3 / v, 0.01, **more) for v in speeds]


UNEQUAL = cluster((1.0, 0.64, 0.27), jitter=0.03)
LINK = LinkProfile(gradient_bytes=25e6, rate=1.25e9)


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if not entry.needs])
def test_every_policy_keeps_the_total_and_runs_on(policy):
    known = (1.0, 0.64, 0.27) if policy == "static" else ()
    result = ClusterSimulator(UNEQUAL, 300, link=LINK, policy=policy, seed=1, capacities=known).run(60)
    assert (result.sizes.sum(axis=1) == 300).all()
    assert (result.totals == 300).all()
    assert result.steps == len(result.seconds) == len(result.clock) == 60
    assert (result.exact >= result.optimum * (1 - 1e-12)).all()
    assert (result.idle >= -1e-6).all()
    if policy == "even":
        assert len(result.plans) == 1
    if policy in ("perf_model", "pid"):
        assert result.share_since(40) > 0.97 > result.exact[0] ** -1 * result.optimum[0]


def test_the_optimum_is_reached_and_kept():
    result = ClusterSimulator(UNEQUAL, 300, link=LINK, seed=3).run(200)
    assert result.first_within(0.05) <= 20
    assert result.first_within(0.01, for_good=True) <= 60
    assert result.share_since(60) >= 0.99


def test_a_run_in_parts_is_the_run_at_once():
    at_once = ClusterSimulator(UNEQUAL, 300, link=LINK, seed=5).run(90)
    simulator = ClusterSimulator(UNEQUAL, 300, link=LINK, seed=5)
    for steps in (1, 6, 3, 0, 40, 1, 1, 38):
        in_parts = simulator.run(steps)
    for name in ("seconds", "exact", "optimum", "clock", "sizes", "idle"):
        np.testing.assert_allclose(getattr(in_parts, name), getattr(at_once, name), rtol=1e-12)
    assert in_parts.plans == at_once.plans
    assert [r.step for r in in_parts.rounds] == [r.step for r in at_once.rounds]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6), st.integers(0, 1000))
def test_no_policy_beats_the_optimum(speeds, seed):
    result = ClusterSimulator(cluster(speeds, jitter=0.05), 40 * len(speeds), link=LINK, seed=seed).run(40)
    assert (result.exact >= result.optimum * (1 - 1e-9)).all()
    assert (result.sizes.sum(axis=1) == 40 * len(speeds)).all()
    assert 0 < result.share_of_optimum <= 1 + 1e-9


def test_a_slowdown_of_the_profile_is_followed():
    devices = cluster((1.0, 1.0), jitter=0.02)[:1] + cluster((1.0,), jitter=0.02, slowdown={100: 2.0})
    result = ClusterSimulator(devices, 200, link=LINK, seed=2).run(300)
    assert result.share_since(250) > 0.98
    assert result.optimum[99] < result.optimum[100]
    assert abs(result.sizes[99, 0] - 100) <= 4 < result.sizes[-1, 0] - 110


def test_memory_bounds_hold():
    devices = [DeviceProfile(1e-3, 0, 2e-3, 0, memory=60), DeviceProfile(4e-3, 0, 8e-3, 0)]
    simulator = ClusterSimulator(devices, 100)
    result = simulator.run(60)
    assert result.sizes[-1].tolist() == [60, 40]
    assert simulator.optimum()[1].tolist() == [60, 40]


def test_a_planner_of_ones_own_and_a_given_plan():
    simulator = ClusterSimulator(UNEQUAL, 300, link=LINK, policy=PerfModelPlanner())
    simulator.adopt(BatchPlan(300, (200, 60, 40)), "by hand")
    assert simulator.plan.local_batch_sizes == (200, 60, 40)
    result = simulator.run(5)
    assert result.sizes[0].tolist() == [200, 60, 40]
    assert result.plans[-1].reason == "by hand"


def test_the_rate_of_a_link_along_its_trace():
    link = LinkProfile(gradient_bytes=1e6, rate=1e6, buckets=2, trace=[(10.0, 1e5)])
    result = ClusterSimulator(cluster((1.0, 1.0)), 20, link=link, policy="even").run(20)
    before, after = result.clock < 10.0, result.clock - result.seconds > 10.0
    assert np.ptp(result.seconds[before]) < 1e-9
    np.testing.assert_allclose(result.seconds[after] - result.exact[after], 0.0, atol=1e-9)
    assert result.seconds[after].min() > 5 * result.seconds[before].max()
    constant = ClusterSimulator(cluster((1.0, 1.0)), 20, link=LinkProfile(1e6, 1e6, buckets=2), policy="even").run(3)
    np.testing.assert_allclose(constant.seconds, result.seconds[:3])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"devices": []}, TypeError, "must be a list of one DeviceProfile per worker"),
        ({"devices": ["A100"]}, TypeError, "must be a list of one DeviceProfile per worker"),
        ({"total_batch_size": 0}, ValueError, "total_batch_size=0 is too small"),
        ({"total_batch_size": 2}, ValueError, "cannot give each of 3 workers"),
        ({"link": 100}, TypeError, "link=100 must be a LinkProfile"),
        ({"policy": "best"}, ValueError, "policy='best' is unknown"),
        ({"policy": "goodput"}, ValueError, "policy='goodput' needs max_total_batch_size; give its planner instead"),
        ({"policy": PerfModelPlanner}, TypeError, "is a class; give an instance"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"min_local": 0}, ValueError, "min_local=0"),
        ({"names": ["a", "b"]}, ValueError, "must be 3 different strings"),
        ({"names": ["a", "b", "b"]}, ValueError, "must be 3 different strings"),
        ({"capacities": [1.0]}, ValueError, "capacities has 1 entries for 3 devices"),
        ({"replan": "often"}, ValueError, "replan='often'"),
        ({"hysteresis": 2.0}, ValueError, "hysteresis=2.0"),
        ({"change_cost": -1.0}, ValueError, "change_cost=-1.0"),
        ({"round_seconds": -1.0}, ValueError, "round_seconds=-1.0"),
        ({"ahead": -1}, ValueError, "ahead=-1"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=text):
        ClusterSimulator(**{"devices": UNEQUAL, "total_batch_size": 300, **wrong})


def conditions(**settings):
    """Conditions that a planner is told in each round."""
    recording = RecordingPlanner(PerfModelPlanner())
    ClusterSimulator(cluster((1.0, 0.5)), 100, policy=recording, **settings).run(60)
    return [seen.context for seen in recording.log]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hysteresis": 0.25}, {"hysteresis": 0.25}),
        ({"change_cost": 3.0}, {"change_cost": 3.0}),
        ({"names": ["one", "other"]}, {"identities": ("one", "other")}),
        ({"min_local": 7}, {"min_local": (7, 7)}),
    ],
)
def test_a_planner_is_told_what_is_given(given, told):
    found = conditions(**given)
    assert found
    assert all({name: getattr(one, name) for name in told} == told for one in found)


def test_the_least_samples_of_a_worker_bound_the_split_and_the_optimum():
    simulator = ClusterSimulator(cluster((1.0, 0.1)), 100, min_local=30)
    assert simulator.run(60).sizes[-1].tolist() == [70, 30]
    assert simulator.optimum()[1].tolist() == [70, 30]
