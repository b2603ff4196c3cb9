"""Simulations of whole trainings: what always holds, and what a run of them says."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner
from lightning_hetero.simulate.cluster.truth.factors import Factors


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


def test_the_clock_counts_steps_and_rounds():
    result = ClusterSimulator(UNEQUAL, 300, link=LINK, round_seconds=0.25).run(40)
    before = [sum(0.25 for round_ in result.rounds if round_.step <= t) for t in range(40)]
    np.testing.assert_allclose(result.clock, np.cumsum(result.seconds) + before)
    assert len(result.rounds) >= 1


def test_rounds_come_as_the_schedule_says():
    """At 0.5 % of the time: a round of 10 ms every 2 s."""
    device = DeviceProfile(q=0.0, s=0.05, k=0.0, m=0.05)
    result = ClusterSimulator([device, device], 8, round_seconds=0.01).run(100)
    assert [round_.step for round_ in result.rounds] == [8, 28, 48, 68, 88]


def test_equal_workers_never_change():
    for seed in range(5):
        result = ClusterSimulator(cluster([1.0] * 8, jitter=0.1), 512, link=LINK, seed=seed).run(150)
        assert len(result.plans) == 1


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6), st.integers(0, 1000))
def test_no_policy_beats_the_optimum(speeds, seed):
    result = ClusterSimulator(cluster(speeds, jitter=0.05), 40 * len(speeds), link=LINK, seed=seed).run(40)
    assert (result.exact >= result.optimum * (1 - 1e-9)).all()
    assert (result.sizes.sum(axis=1) == 40 * len(speeds)).all()
    assert 0 < result.share_of_optimum <= 1 + 1e-9


def test_a_slower_worker_makes_no_step_shorter():
    even = {"policy": "even", "link": LINK}
    fast, slow = (ClusterSimulator(cluster((1.0, v)), 100, **even).run(5).seconds for v in (0.5, 0.4))
    assert (slow > fast).all()


def test_a_slowdown_of_the_profile_is_followed():
    devices = cluster((1.0, 1.0), jitter=0.02)[:1] + cluster((1.0,), jitter=0.02, slowdown={100: 2.0})
    result = ClusterSimulator(devices, 200, link=LINK, seed=2).run(300)
    assert result.share_since(250) > 0.98
    assert result.optimum[99] < result.optimum[100]
    assert abs(result.sizes[99, 0] - 100) <= 4 < result.sizes[-1, 0] - 110


def test_slow_down_is_from_the_next_step_on_and_taken_back():
    simulator = ClusterSimulator(cluster((1.0, 1.0)), 200, link=LINK, policy="even")
    simulator.run(3)
    simulator.slow_down([1.0, 2.0], link=3.0)
    simulator.run(3)
    simulator.slow_down(1.0)
    seconds = simulator.run(3).seconds
    assert np.ptp(seconds[[0, 1, 2, 6, 7, 8]]) < 1e-12
    assert seconds[3] > 1.5 * seconds[0]


def test_memory_bounds_hold():
    devices = [DeviceProfile(1e-3, 0, 2e-3, 0, memory=60), DeviceProfile(4e-3, 0, 8e-3, 0)]
    simulator = ClusterSimulator(devices, 100)
    result = simulator.run(60)
    assert result.sizes[-1].tolist() == [60, 40]
    assert simulator.optimum()[1].tolist() == [60, 40]


def test_a_plan_holds_after_the_steps_that_are_drawn():
    result = ClusterSimulator(UNEQUAL, 300, link=LINK, ahead=5).run(60)
    first = result.rounds[0]
    assert result.plans[1].step == first.step + 5
    assert result.sizes[first.step + 4].tolist() == [100, 100, 100] != result.sizes[first.step + 5].tolist()


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


def test_a_simulation_needs_neither_torch_nor_a_trainer():
    code = (
        "import sys; from lightning_hetero.simulate import ClusterSimulator, DeviceProfile\n"
        "ClusterSimulator([DeviceProfile(0.001, 0, 0.002, 0)] * 2, 20).run(20)\n"
        "sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"staleness": -1}, "staleness=-1"),
        ({"staleness": 2}, "staleness=2"),
        ({"policy": "static", "capacities": [1.0, 0.0]}, r"capacities\[1\]=0.0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, says):
    device = DeviceProfile(q=0.001, s=0.01, k=0.002, m=0.02)
    with pytest.raises(ValueError, match=says):
        ClusterSimulator([device, device], 16, **wrong)


def test_devices_that_take_no_time():
    result = ClusterSimulator([DeviceProfile(0, 0, 0, 0)] * 2, 16, policy="even").run(4)
    assert result.seconds.tolist() == [0.0] * 4


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


def test_a_planner_is_told_what_a_change_was_measured_to_cost_and_the_steps_since_the_last_round():
    found = conditions(replan=12)
    assert [one.elapsed for one in found] == [12] * 5
    assert found[0].change_cost is None
    assert found[-1].change_cost is not None


def test_the_least_samples_of_a_worker_bound_the_split_and_the_optimum():
    simulator = ClusterSimulator(cluster((1.0, 0.1)), 100, min_local=30)
    assert simulator.run(60).sizes[-1].tolist() == [70, 30]
    assert simulator.optimum()[1].tolist() == [70, 30]


class Doubled:
    """Factors of workers that take twice as long, and of a link that takes three times as long."""

    def take(self, steps):
        return Factors(np.full((steps, 2), 2.0), np.full((steps, 2, 2), 2.0), np.full(steps, 3.0))


def test_factors_take_the_place_of_those_of_the_profiles():
    link, own = LinkProfile(gradient_bytes=1e6, rate=1e6, buckets=1), cluster((1.0, 1.0), jitter=0.1)
    result = ClusterSimulator(own, 20, link=link, policy="even", factors=Doubled()).run(5)
    np.testing.assert_allclose(result.seconds, 2 * own[0].seconds(10) + 3 * link.seconds(2).sum())
