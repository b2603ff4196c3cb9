"""Simulated trainings: what always holds, when plans hold, workers that come and go, and what a result says."""

import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, Join, Leave, LinkProfile, NoiseTrajectory
from tests.simulate.planners import Watching


def cluster(speeds, **more):
    return [DeviceProfile(0.35e-3 / v, 0.01, 0.65e-3 / v, 0.01, **more) for v in speeds]


UNEQUAL = cluster((1.0, 0.64, 0.27), jitter=0.03)
LINK = LinkProfile(gradient_bytes=25e6, rate=1.25e9)
CONSTANT = [DeviceProfile(0, 1, 0, 0)] * 3
"""Workers whose steps take a second at any size."""


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if not entry.needs])
def test_every_policy_keeps_the_total_and_runs_on(policy):
    known = (1.0, 0.64, 0.27) if policy == "static" else ()
    result = ClusterSimulator(UNEQUAL, 300, link=LINK, policy=policy, seed=1, capacities=known).run(60)
    assert (result.sizes.sum(axis=1) == 300).all()
    assert (result.totals == 300).all()
    assert result.steps == len(result.seconds) == len(result.clock) == 60
    assert (result.exact >= result.optimum * (1 - 1e-12)).all()
    assert (result.idle >= -1e-6).all()
    if policy in ("perf_model", "pid"):
        assert result.share_since(40) > 0.97 > result.exact[0] ** -1 * result.optimum[0]


def test_a_run_in_parts_is_the_run_at_once():
    at_once = ClusterSimulator(UNEQUAL, 300, link=LINK, seed=5).run(90)
    simulator = ClusterSimulator(UNEQUAL, 300, link=LINK, seed=5)
    for steps in (1, 6, 3, 0, 80):
        in_parts = simulator.run(steps)
    for name in ("seconds", "exact", "optimum", "clock", "sizes", "idle"):
        np.testing.assert_allclose(getattr(in_parts, name), getattr(at_once, name), rtol=1e-12)
    assert in_parts.plans == at_once.plans
    assert [r.step for r in in_parts.rounds] == [r.step for r in at_once.rounds]


def test_bounds_of_sizes_hold_for_the_split_and_the_optimum():
    small = [DeviceProfile(1e-3, 0, 2e-3, 0, memory=60), DeviceProfile(4e-3, 0, 8e-3, 0)]
    for devices, given, sizes in ((small, {}, [60, 40]), (cluster((1.0, 0.1)), {"min_local": 30}, [70, 30])):
        simulator = ClusterSimulator(devices, 100, **given)
        assert simulator.run(60).sizes[-1].tolist() == simulator.optimum()[1].tolist() == sizes


# any device, noise and speed


class Known:
    """A device that has a profile's times and says nothing else of itself."""

    def __init__(self, profile):
        self.times = profile.times


class Tiles:
    """A device that computes whole tiles, as kernels do."""

    def __init__(self, tile, seconds, memory=None):
        self.tile, self.seconds, self.memory = tile, seconds, memory

    def times(self, batch_size):
        tiles = -(-batch_size // self.tile)
        return self.seconds * tiles, 2 * self.seconds * tiles


@pytest.mark.parametrize(
    "more", [{}, {"compression": BlockTopK(density=0.1, warmup_steps=8)}], ids=["dense", "messages"]
)
def test_any_object_with_times_is_a_device_as_its_profile_is(more):
    devices, given = cluster((1.0, 0.64, 0.27)), {"link": LINK, "seed": 1, "names": ["a", "b", "c"], **more}
    events = [] if more else [Leave(30, "b"), Join(60, devices[1], "b")]
    by_profile = ClusterSimulator(devices, 300, events=events, **given).run(90)
    others = [] if more else [Leave(30, "b"), Join(60, Known(devices[1]), "b")]
    simulator = ClusterSimulator([Known(device) for device in devices], 300, events=others, **given)
    found = simulator.run(90)
    for name in ("seconds", "exact", "optimum", "clock", "sizes"):
        np.testing.assert_allclose(getattr(found, name), getattr(by_profile, name), rtol=1e-12)
    with pytest.raises(TypeError, match="DeviceProfile"):
        simulator.coefficients()


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_of_any_devices_is_the_best_of_all_splits(seed):
    rng = np.random.default_rng(seed)
    slow = rng.uniform(0.5, 2.0, 3)
    for _ in range(10):
        devices = [Tiles(int(rng.integers(1, 5)), rng.uniform(0.1, 1.0), int(rng.integers(4, 12))) for _ in range(3)]
        total = int(rng.integers(3, sum(device.memory for device in devices)))
        simulator = ClusterSimulator(devices, total, link=LinkProfile(1.0, 1.0, buckets=2), slowdown=lambda step: slow)
        splits = [(a, b, total - a - b) for a in range(1, total) for b in range(1, total - a)]
        times = [
            simulator.time(BatchPlan(total, split))
            for split in splits
            if all(size <= device.memory for size, device in zip(split, devices, strict=True))
        ]
        seconds, sizes = simulator.optimum()
        assert seconds == pytest.approx(min(times), rel=1e-12)
        assert simulator.time(BatchPlan(total, tuple(sizes.tolist()))) == pytest.approx(seconds, rel=1e-12)


def test_noise_and_slowdown_are_those_of_each_step_and_the_optimum_knows_the_slowdown_only():
    asked = []

    def noise(rng, step, workers):
        asked.append((step, workers))
        return np.array([[1.0, 1.0], [2.0, 3.0]]) if step % 2 else np.ones(workers)

    def slowdown(step):
        return [1.0, 1.0 if step < 10 else 4.0]

    devices = [Tiles(1, 0.1), DeviceProfile(0.1, 0.0, 0.2, 0.0)]
    given = {"policy": "even", "replan": "epoch", "noise": noise, "slowdown": slowdown}
    found = ClusterSimulator(devices, 8, **given).run(20)
    assert asked == [(step, 2) for step in range(20)]
    expected = [0.4 * slow * (2 + 2 * 3 if step % 2 else 3) for step, slow in enumerate([1.0] * 10 + [4.0] * 10)]
    np.testing.assert_allclose(found.seconds, expected)
    np.testing.assert_allclose(found.exact, [1.2] * 10 + [4.8] * 10)
    np.testing.assert_allclose(found.optimum, [1.2] * 10 + [2.1] * 10)


@pytest.mark.parametrize("given", [np.ones(3), [1.0, 0.0], math.nan])
def test_factors_that_fit_no_worker_or_are_none_are_refused_by_name(given):
    for name, function in (("noise", lambda rng, step, workers: given), ("slowdown", lambda step: given)):
        with pytest.raises(ValueError, match=name):
            ClusterSimulator(CONSTANT[:2], 8, **{name: function}).run(1)


# sync rounds


@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_each_plan_runs_from_its_step_to_the_next_and_a_round_says_what_is_predicted_of_it(ahead):
    splits = [(100 + i, 100 - i, 100) for i in range(1, 40)]
    result = ClusterSimulator(CONSTANT, 300, policy=Watching(splits), replan=4, ahead=ahead).run(60)
    assert [entry.step for entry in result.plans[1:]] == [step + ahead for step in range(4, 61, 4)]
    ends = [*(entry.step for entry in result.plans[1:]), 10**9]
    for entry, end in zip(result.plans, ends, strict=True):
        assert (result.sizes[entry.step : end] == entry.plan.local_batch_sizes).all()
    for one in result.rounds:
        assert one.predicted == result.sizes[one.step - 1, 0]
        newest = [entry.plan.local_batch_sizes for entry in result.plans if entry.step < one.step + ahead][-1]
        assert one.error == (0.5 if newest[0] == one.predicted else None)


def test_a_planner_is_told_what_is_given():
    planner = Watching()
    given = {"hysteresis": 0.25, "change_cost": 3.0, "min_local": 7, "names": ["one", "other"]}
    ClusterSimulator(CONSTANT[:2], 100, policy=planner, replan=10, **given).run(30)
    assert len(planner.seen) == 3
    for _, context in planner.seen:
        assert (context.hysteresis, context.change_cost, context.elapsed) == (0.25, 3.0, 10)
        assert (context.identities, context.min_local) == (("one", "other"), (7, 7))


def test_warm_up_steps_and_the_first_step_of_a_new_size_on_any_rank_are_not_timed():
    devices = [DeviceProfile(0, 1, 0, 0, slowdown={t: t + 1.0 for t in range(40)})] * 3  # step t takes t + 1 seconds
    planner = Watching([(4, 5, 3), (4, 4, 4), (4, 4, 4)])
    ClusterSimulator(devices, 12, policy=planner, replan=5).run(20)
    assert [seen.forward[:, 0].tolist() for seen, _ in planner.seen] == [
        [4.0, 5.0],
        [7.0, 8.0, 9.0, 10.0],
        [12.0, 13.0, 14.0, 15.0],
        [16.0, 17.0, 18.0, 19.0, 20.0],
    ]


# workers that join and leave

DEVICES = cluster((1.0, 0.5, 0.25, 0.25), jitter=0.02)


def test_a_worker_leaves_and_comes_back_and_the_others_keep_what_is_known_of_them():
    events = [Leave(100, "device 0"), Join(200, DEVICES[0], "device 0")]
    result = ClusterSimulator(DEVICES, 400, link=LINK, events=events, restart_seconds=30.0, seed=4).run(300)
    assert (result.sizes.sum(axis=1) == 400).all()
    assert (result.sizes[100:200, 0] == 0).all()
    assert np.isnan(result.idle[100:200, 0]).all()
    assert not np.isnan(result.idle[:, 1:]).any()
    for first in (100, 200):
        assert result.optimum[first] / result.exact[first] > 0.95  # from the first step on
        assert result.clock[first] - result.clock[first - 1] > 30.0
    assert result.share_since(280) > 0.98
    assert result.optimum[150] > result.optimum[50] == pytest.approx(result.optimum[250])


def test_what_is_slow_stays_slow_when_others_join_or_leave():
    no_time, device = DeviceProfile(0, 0, 0, 0), DeviceProfile(0.0, 0.5, 0.0, 0.5)
    link = LinkProfile(gradient_bytes=1e6, rate=1e6, buckets=1)
    events = [Leave(2, "device 0"), Join(4, no_time, "new")]
    simulator = ClusterSimulator([no_time, device, no_time], 12, link=link, policy="even", events=events)
    simulator.slow_down([1.0, 3.0, 1.0], link=5.0)
    result = simulator.run(6)
    np.testing.assert_allclose(result.seconds, 3 + 5 * np.repeat([4 / 3, 1.0, 4 / 3], 2))
    np.testing.assert_allclose(result.exact, result.seconds)
    simulator.slow_down(1.0)
    np.testing.assert_allclose(simulator.run(1).seconds[-1], 1 + 4 / 3)
    with pytest.raises(ValueError, match="factors"):
        simulator.slow_down([1, 2])


# totals


def test_the_total_goes_where_goodput_is_highest():
    devices, scale = cluster((1.0, 0.5, 0.25), jitter=0.02), 2000.0
    noise = NoiseTrajectory(lambda samples: scale, errors=(0.1, 0.05))
    policy = GoodputPlanner(max_total_batch_size=20_000)
    simulator = ClusterSimulator(devices, 60, link=LINK, policy=policy, noise_scale=noise, seed=1)
    result = simulator.run(300)

    def goodput(total):
        return total / simulator.optimum(total)[0] * (scale + 60) / (scale + total)

    best = max(goodput(total) for total in np.unique(np.geomspace(60, 20_000, 100).astype(int)))
    assert goodput(int(result.totals[-1])) > 0.97 * best
    assert (result.sizes.sum(axis=1) == result.totals).all()
    assert result.samples[-1] == result.totals.sum()


# results and errors


def test_a_result_says_when_the_optimum_was_reached_and_which_share_of_it():
    """Equal workers, so that the even split is the optimum."""
    splits = [(50, 50), (52, 48), (50, 50), (60, 40), (50, 50)]
    simulator = ClusterSimulator([DeviceProfile(0.001, 0, 0, 0)] * 2, 100, policy=Watching(splits), replan=4)
    simulator.adopt(BatchPlan(100, (70, 30)))
    result = simulator.run(24)
    ratios = [1.4, 1.0, 1.04, 1.0, 1.2, 1.0]  # four steps each
    assert (result.exact / result.optimum)[::4] == pytest.approx(ratios)
    assert result.share_of_optimum == pytest.approx(6 / sum(ratios))
    assert result.share_since(12) == pytest.approx(3 / sum(ratios[3:]))
    for gap, since, first, for_good in ((0.05, 0, 4, 20), (0.001, 5, 0, 15), (0.001, 8, 4, 12), (0.3, 7, 0, 0)):
        assert result.first_within(gap, since=since) == first
        assert result.first_within(gap, since=since, for_good=True) == for_good
    even = ClusterSimulator(cluster((1.0, 0.1)), 100, policy="even").run(5)
    assert even.first_within(0.05) == even.first_within(0.05, for_good=True) == math.inf


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"policy": "best"}, ValueError),
        ({"capacities": [1.0]}, ValueError),
        ({"compression": "block_topk"}, TypeError),
        ({"staleness": 2, "compression": BlockTopK()}, ValueError),
    ],
)
def test_bad_input_is_named(wrong, error):
    with pytest.raises(error, match=next(iter(wrong))):
        ClusterSimulator(**{"devices": UNEQUAL, "total_batch_size": 300, **wrong})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ClusterSimulator(UNEQUAL, 2), ValueError, "3 workers"),
        (lambda: ClusterSimulator(UNEQUAL, 9, policy=PerfModelPlanner), TypeError, "PerfModelPlanner"),
        (lambda: ClusterSimulator(UNEQUAL, 9, compression=BlockTopK(dense_every=5)), ValueError, "dense_every=5"),
        (lambda: ClusterSimulator(UNEQUAL, 9, events=[Leave(5, "device 7")]), ValueError, "'device 7'"),
        (lambda: ClusterSimulator(UNEQUAL, 9, events=[Join(5, DEVICES[0], "device 1")]), ValueError, "'device 1'"),
        (lambda: ClusterSimulator(DEVICES[:1], 9, events=[Leave(5, "device 0")]), ValueError, "nobody is left"),
    ],
)
def test_what_cannot_happen_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
