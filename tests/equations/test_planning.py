"""The split of least step time on curves of any shape, and what the planner makes of times that are no line."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning import split
from lightning_hetero.core.planning.link_times import LinkTimes
from lightning_hetero.core.planning.planner import PerfModelPlanner, Trial
from lightning_hetero.core.planning.split import finish_times, solve
from lightning_hetero.core.planning.worker_times import WorkerTimes, since_jump
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile
from tests.equations.clusters import context, drive, even_plan, line_workers


def test_no_other_whole_split_ends_a_step_earlier(seed):
    rng = np.random.default_rng(seed)
    for _ in range(150):
        workers, unit = int(rng.choice([1, 2, 3, 16])), int(rng.integers(1, 3))
        low = unit * rng.integers(0, 3, workers).astype(float)
        high = low + unit * rng.integers(0, 8, workers)
        total = unit * int(rng.integers(low.sum() / unit, high.sum() / unit + 1))
        at = np.sort(rng.uniform(1, 20, (workers, 4)), axis=1)
        at[:, 0] = 0
        flat = rng.random((workers, 4)) < 0.2
        ends = [np.cumsum(rng.random((workers, 4)) * ~flat, axis=1).T + 0.01 for _ in range(2)]
        curves = np.tile(at.T, 2), np.concatenate(ends, axis=1)
        found = solve(curves, low, high, total, unit)
        assert found.sum() == total
        assert ((found >= low) & (found <= high) & (found % unit == 0)).all()
        last, grid = finish_times(curves, found.astype(float)).max(), low + unit * np.arange(9)[:, None]
        earlier = [(b <= high) & (finish_times(curves, b) < last * (1 - 1e-6)) for b in grid]
        assert not earlier[0].all() or np.where(earlier, grid, 0).max(axis=0).sum() < total


def test_a_split_is_found_at_once_where_a_time_hardly_depends_on_the_samples(monkeypatch):
    """Within the digits of that time, the workers could take thousands of samples more than there are."""
    calls, workers = [], 16
    monkeypatch.setattr(split, "finish_times", lambda *given: calls.append(0) or finish_times(*given))
    curve = np.tile([[0.0], [4e4]], workers), np.tile([[0.02], [0.02 + 1e-10]], workers)
    found = solve(curve, np.ones(workers), np.full(workers, 3e4), 30_000)
    assert found.sum() == 30_000
    assert np.ptp(found) <= 1
    assert len(calls) < 3 * workers
    calls.clear()
    at, seconds = np.tile([[0.0], [1500.0], [1e5]], 2), np.array([[0.004, 0.001], [0.018, 0.01], [0.018, 0.8]])
    # the first one takes any number in 18 ms
    found = solve((at, seconds), np.ones(2), np.array([1e5, 1500.0]), 50_000)
    assert (found.sum(), len(calls) < 10) == (50_000, True)


def test_a_size_that_ran_counts_as_measured_and_others_follow_the_line():
    times, jitter = WorkerTimes.of(("a",)), 0.01 * np.array([-1.0, 1.0] * 8)[:, None]
    taken = {8.0: 0.02, 16.0: 0.03, 24.0: 0.06, 32.0: 0.05}  # 24 is a step too far
    for size, seconds in taken.items():
        times = times.observe(np.array([size]), seconds * (1 + jitter), 2 * seconds * (1 + jitter), 16)
    for size, seconds in taken.items():
        if size != 32.0:  # a larger batch is never taken to be shorter
            assert times.parts(np.array([size]))[0] == pytest.approx([seconds, 2 * seconds], rel=0.05)
    assert times.parts(np.array([20.0])).sum() == pytest.approx(0.135, rel=0.05), "half way"
    far = times.parts(np.array([64.0])).sum() / times.parts(np.array([32.0])).sum()
    assert 1.2 < far < 2.1
    assert times.errors(np.array([20.0])) > times.errors(np.array([16.0]))


def test_times_of_sizes_near_those_that_ran_are_the_surest():
    times = observed((10.0, 12.0), (0.1, 0.12))
    errors = [float(times.errors(np.array([size]))[0]) for size in (10.0, 11.0, 5.0, 30.0)]
    assert errors == sorted(errors)
    assert errors[1] < 0.05 < 0.1 < errors[3]


def staircase(planner, speeds, tile, total, steps, rng, multiple=1):
    """Plans of a run whose times rise by tiles, and their exact step times."""
    ctx = context(total, len(speeds), multiple=multiple)
    plan, plans = even_plan(ctx), []

    def seconds(sizes):
        return 0.003 * np.ceil(np.array(sizes) / tile) * tile / speeds + 0.015

    for _ in range(steps // 8):
        b = np.tile(np.array(plan.local_batch_sizes, float), (8, 1))
        took = seconds(plan.local_batch_sizes) * (1 + 0.03 * rng.standard_normal(b.shape))
        zeros, step = np.zeros_like(b), np.broadcast_to(took.max(axis=1, keepdims=True), b.shape)
        decision = planner.decide(StepObservations(b, took / 3, 2 * took / 3, zeros, zeros, zeros, step), plan, ctx)
        planner, plan = decision.planner, decision.proposal.plan if decision.proposal else plan
        plans.append(plan.local_batch_sizes)
    return plans, seconds


@pytest.mark.parametrize("tile", [16, 32])
def test_times_that_rise_by_tiles_do_not_change_the_split_for_ever(tile, seed):
    """GPU kernels run in tiles. A planner of lines once changed 69 times in 500 steps here, at 0.76 of the optimum."""
    speeds, total, rng = np.array([5.0, 4.0, 3.0, 2.0]), 480, np.random.default_rng(seed)
    plans, seconds = staircase(PerfModelPlanner(), speeds, tile, total, 496, rng)
    some = itertools.product(range(tile, total, tile), repeat=3)
    best = min(seconds((*few, total - sum(few))).max() for few in some if sum(few) < total)  # no tile is begun for less
    assert sum(a != b for a, b in itertools.pairwise(plans)) <= 26
    assert best / np.mean([seconds(split).max() for split in plans[-20:]]) >= 0.85
    whole, _ = staircase(PerfModelPlanner(), speeds, tile, total, 496, rng, multiple=tile)
    assert best / seconds(whole[-1]).max() >= 0.97


def seen_of(sizes, seconds, steps=8, noise=0.01, rng=0):
    """Steps in which the workers take these seconds, with some noise."""
    b = np.tile(np.array(sizes, float), (steps, 1))
    took = np.array(seconds) * (1 + noise * np.random.default_rng(rng).standard_normal(b.shape)).clip(0.2)
    zeros, step = np.zeros_like(b), np.broadcast_to(took.max(axis=1, keepdims=True), b.shape)
    return StepObservations(b, took / 3, 2 * took / 3, zeros, zeros, zeros, step)


def changed(after):
    """A planner that changed from 20/20, since that promised half, and the decision after it took so long."""
    ctx = context(40, 2)
    first = PerfModelPlanner().decide(seen_of((20, 20), (0.02, 0.06)), even_plan(ctx), ctx)
    plan = first.proposal.plan
    assert plan.local_batch_sizes == (33, 7)
    return ctx, first, first.planner.decide(seen_of(plan.local_batch_sizes, after), plan, ctx)


def test_a_change_that_gained_nothing_makes_the_next_promise_count_less():
    """Both workers take as long as the slower one did: predicted was half."""
    kept, lost = changed((0.03, 0.031))[2].planner.credit, changed((0.06, 0.058))[2].planner.credit
    assert kept > 0.95
    assert lost < 0.6
    ctx, first, _ = changed((0.03, 0.031))
    # 40 % gained of what was promised, or lost
    for *trial, credit in (
        (0.06, 0.0, 0.5, 0.9),
        (0.06, 0.003, 0.5, 1.0),
        (0.06, 0.0, 0.1, 1.0),
        (0.01, 0.0, 0.5, 0.1),
    ):
        planner = replace(first.planner, trial=Trial(*trial, (33, 7)))
        assert planner.observe(seen_of((33, 7), (0.036, 0.036)), ctx).credit == pytest.approx(credit, abs=0.03)
    for credit, moves in ((1.0, True), (1e-3, False)):
        planner = replace(PerfModelPlanner(), credit=credit)
        decision = planner.decide(seen_of((20, 20), (0.02, 0.06)), even_plan(ctx), replace(ctx, elapsed=0))
        assert (decision.proposal is not None) == moves


def test_a_change_that_lost_is_undone_by_what_was_measured():
    """A step in the time of the faster worker beyond 20 samples: 33/7 takes half as long again as 20/20 did."""
    _, first, second = changed((0.09, 0.031))
    assert 20 <= second.proposal.plan.local_batch_sizes[0] <= 26
    assert second.planner.credit < 0.6
    for planner in (first.planner, second.planner):  # speeds may be others when a run goes on: a trial is not kept
        after = PerfModelPlanner().loaded(json.loads(json.dumps(planner.state_dict())))
        assert after == replace(planner, trial=None, ranks=())


@pytest.mark.parametrize(("speeds", "each"), [((4, 2, 1), 2), ((2, 1), 4), ((1.5, 1.5, 1, 1), 4)])
def test_workers_with_few_samples_and_much_fixed_time_are_balanced(speeds, each):
    """Lines through the origin see no better whole split: one sample moves, and shows what it costs."""
    fixed = 0.6 / 0.4 * 0.01 * each / min(speeds)
    devices = [DeviceProfile(q=0.01 / 3 / v, s=fixed / 3, k=0.02 / 3 / v, m=2 * fixed / 3, jitter=0.02) for v in speeds]
    simulated = ClusterSimulator(devices, each * len(devices), seed=1, names=[f"d{i}" for i in range(len(devices))])
    result = simulated.run(200)
    assert result.share_since(100) > 0.999
    assert len(result.plans) <= 4


def test_a_gain_that_may_be_luck_is_looked_at_again_soon_while_the_run_is_young():
    ctx, seen = context(6, 3), seen_of((2, 2, 2), (0.0074, 0.0082, 0.0106), 3, 0.08, 2)
    young, old = (replace(PerfModelPlanner(), steps=n).decide(seen, even_plan(ctx), ctx) for n in (0.0, 200.0))
    assert (young.proposal, young.soon) == (None, True)
    assert (old.proposal, old.soon) == (None, False)
    ctx = context(300, 3)
    little = PerfModelPlanner().decide(seen_of((100,) * 3, (0.099, 0.1, 0.101), 3, 0.05), even_plan(ctx), ctx)
    assert (little.proposal, little.soon) == (None, False)


def test_a_worker_that_only_slows_the_job_down_is_named():
    """Its single sample takes longer than the others need for all the rest."""
    cluster, ctx = line_workers(0.001, 0.001, 0.1), context(64, 3)
    planner, plan, _ = drive(PerfModelPlanner(), cluster, even_plan(ctx), ctx, 2, np.random.default_rng(0))
    assert plan.local_batch_sizes[2] == 1
    assert plan.leave_out == (2,)
    assert plan.step_time_without == pytest.approx(0.032, rel=0.1)
    assert planner.predict(plan, ctx) == pytest.approx(0.1, rel=0.1)
    assert planner.predict(BatchPlan(64, (32, 32, 0)), ctx) == pytest.approx(planner.predict(plan, ctx))


def test_a_round_counts_from_the_last_jump_of_a_speed_and_odd_steps_are_none():
    step = np.full((16, 2), 0.1)
    step[10:, 1] = 0.3
    assert since_jump(step) == 10
    odd = np.full((16, 2), 0.1)
    odd[[3, 12, 14], 0] = 0.5
    assert since_jump(odd) == 0
    assert since_jump(step[9:]) == 0, "too few before it"
    assert since_jump(np.minimum(step, 0.115)) == 0, "too little"
    noise = np.random.default_rng(0).standard_normal((20, 24, 2))
    assert [since_jump(0.1 * (1 + 0.3 * one)) for one in noise] == [0] * 20


# what readers and an independent transcription found


def observed(sizes, taken, names=("a",), steps=16):
    """Times of workers after rounds at these sizes."""
    times = WorkerTimes.of(names)
    for size, seconds in zip(sizes, taken, strict=True):
        b, took = np.broadcast_to(size, len(names)).astype(float), np.broadcast_to(seconds, (steps, len(names)))
        times = times.observe(b, took / 3, 2 * took / 3, steps)
    return times


def test_a_curve_does_not_depend_on_how_many_sizes_others_ran():
    """The mean of a worker's own sizes once became a point of its curve as soon as another had more of them."""
    own, b = observed((10.0, 95.0, 100.0), (0.01, 0.01, 0.1)), np.array([95.0, 40.0])
    both = observed((5.0, 10.0, 95.0, 100.0), (0.01, 0.01, 0.01, 0.1), ("b",)).merge(own).select(("a", "b"))
    assert both.merge(own).names == ("b", "a")
    alone = own.merge(WorkerTimes.of(())).parts(b[:1])
    np.testing.assert_allclose(both.parts(b)[0], alone[0], rtol=0.05)


def test_a_curve_does_not_fall_and_begins_anew_after_a_jump():
    falling = observed((10.0, 20.0), (0.2, 0.15))
    assert (np.diff([falling.parts(np.array([b])).sum() for b in (5.0, 10.0, 20.0, 40.0)]) >= 0).all()
    assert observed((10.0, 10.0), (0.1, 0.2)).steps.max() == pytest.approx(20, rel=0.02)


def test_a_speed_that_jumps_within_a_round_scales_all_sizes_by_the_whole_jump():
    times, took = observed((10.0, 20.0), (0.1, 0.2)), np.full((8, 1), 0.26)
    took[:2] = 0.2
    jumped = times.observe(np.array([20.0]), took / 3, 2 * took / 3, 8)
    assert [jumped.parts(np.array([b])).sum() for b in (10.0, 20.0)] == pytest.approx([0.13, 0.26], rel=0.02)


def test_more_samples_in_less_time_or_fewer_in_more_are_a_jump_at_a_new_size():
    """A worker shrank while a neighbour ran, and grew by a few samples in the moment in which the neighbour left."""
    jumps = [observed((15.0, b), (0.2, t)).jumped[0] for b, t in ((18.0, 0.07), (12.0, 0.4), (18.0, 0.23), (5.0, 0.1))]
    assert jumps == [True, True, False, False]
    assert observed((60.0, 15.0, 18.0), (0.6, 0.2, 0.07)).parts(np.array([60.0])).sum() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(("long", "factor", "mean"), [(2, 10.0, 1.0), (2, 1.3, 1.075)])
def test_rare_steps_that_are_far_longer_do_not_count_and_others_do_but_are_no_jump(long, factor, mean):
    steady, odd, size = np.full((8, 1), 0.1), np.full((8, 1), 0.1), np.array([10.0])
    odd[:long] *= factor
    for before, expected in ((0, mean), (1, (1 + mean) / 2)):
        times = observed((10.0,) * before, (steady,) * before, steps=8).observe(size, odd / 3, 2 * odd / 3, 0)
        assert times.parts(size).sum() == pytest.approx(0.1 * expected, rel=0.02)
        assert not times.jumped.any()
    often = times.observe(size, odd / 3, 2 * odd / 3, 0).observe(size, odd / 3, 2 * odd / 3, 0)
    assert often.parts(size).sum() > times.parts(size).sum() * 1.01
    odd[:3] *= 10  # three of eight are the pace
    assert observed((10.0,), (odd,), steps=8).parts(size).sum() == pytest.approx(odd.mean(), rel=0.02)


def test_noise_is_that_of_usual_steps_in_the_newest_hundreds_and_hides_small_changes():
    rng, size = np.random.default_rng(0), (10.0,) * 20
    noisy, quiet = (0.1 * (1 + noise * rng.standard_normal((20, 16, 1))).clip(0.1) for noise in (0.25, 0.02))
    noisy[:, 0] *= 20
    times = observed(size, noisy)
    assert times.jitter[0] == pytest.approx(0.25, rel=0.25)
    assert times.steps.max() > 200, "no jump in any round"
    two = times.observe(np.array([10.0]), np.full((2, 1), 0.03), np.full((2, 1), 0.06), 2)
    assert two.jitter[0] == times.jitter[0]
    for sizes, took in (((10.0,) * 60, np.concatenate([noisy, quiet, quiet])), ((10.0, 10.0), (0.1, 0.106))):
        assert observed(sizes, took).jitter[0] < 0.12
        assert not observed(sizes, took).jumped.any()
    assert observed((10.0,) * 4, (0.1, 0.1, 0.1, 0.13)).drifting[0] < 0.9, "one round"


def test_the_level_follows_the_newest_round_at_a_known_size_and_of_a_drift_at_a_new_one():
    for sizes in ((100.0, 100.0), (100.0, 140.0, 100.0)):
        usual = [1.0 if b == 100.0 else 0.2 + 0.008 * b for b in sizes]
        assert observed(sizes, (*usual[:-1], 1.06 * usual[-1])).level[0] > 0.03
    steady, new, took = observed((100.0, 100.0), (1.0, 1.0)), np.array([102.0]), np.full((16, 1), 1.08)
    drifts = replace(steady, drift=np.full(1, 8.0))
    still, moving = (one.observe(new, took / 3, 2 * took / 3, 16).level[0] for one in (steady, drifts))
    assert still < 0.01 < 0.03 < moving


def test_a_new_worker_beside_a_known_one_has_no_level_and_waiting_is_not_the_links_time():
    both = observed((10.0,), (0.1,)).select(("a", "b")).observe(np.full(2, 10.0), np.ones((8, 2)), np.ones((8, 2)), 8)
    assert (both.level[1], both.drift[1]) == (0.0, 0.0)
    first, last, sync = np.array([[1.2, 1.0], [1.0, 1.0]]), np.array([[1.0, 1.5], [1.0, 1.0]]), np.ones((2, 2))
    sync[1] = 0.2  # in the first step, both workers wait, one with its first bucket and the other with its last
    seen = StepObservations(np.ones((2, 2)), first, last, 0.2 * last, sync, sync, sync)
    for accumulation, t_o in ((1, 0.2), (3, 0.6)):  # after three micro-batches, the second worker is last in both
        planner = PerfModelPlanner().observe(seen, context(2, 2, accumulation=accumulation))
        assert planner.link.at(2)[1] == pytest.approx(t_o)


def test_a_size_beyond_those_that_are_remembered_begins_anew():
    times = observed(np.arange(10.0, 21.0), np.arange(10.0, 21.0))
    assert times.steps[times.size == 20.0].tolist() == [16.0]


def test_a_speed_that_drifts_shows_whatever_the_sizes_and_a_steady_one_does_not():
    rng, rounds = np.random.default_rng(0), np.arange(32.0)
    walk = np.exp(np.cumsum(0.02 * rng.standard_normal(32)))[:, None, None]
    noise = 1 + 0.03 * rng.standard_normal((32, 8, 1))
    near, far = 100 + rounds % 3, 100 + 20 * (rounds % 3)
    drifts = [observed(b, 1e-3 * walk * noise * b[:, None, None], steps=8) for b in (near, far)]
    steady = [observed(b, 1e-3 * noise * b[:, None, None], steps=8) for b in (near, far)]
    assert min(one.drifting[0] for one in drifts) > 0.9 > 0.2 > max(one.drifting[0] for one in steady)
    assert drifts[0].parts(np.array([100.0])).sum() == pytest.approx(0.1 * (walk * noise)[-1].mean(), rel=0.01)
    one = PlanContext(40, ("a",), (1,))
    for times, moving in ((drifts[0], True), (steady[0], False)):
        assert PerfModelPlanner(times).decide(StepObservations.empty(1), even_plan(one), one).moving == moving


def test_a_worker_that_takes_no_time_at_all_leaves_the_others_predictable():
    ctx, planner = context(40, 2), PerfModelPlanner()
    for _ in range(3):
        planner = planner.observe(seen_of((20, 20), (0.0, 0.06)), ctx)
    planner = planner.loaded(planner.state_dict()).observe(seen_of((20, 20), (0.02, 0.06)), ctx)
    assert planner.decide(seen_of((20, 20), (0.02, 0.06)), even_plan(ctx), ctx).proposal is not None


def test_time_beside_the_steps_is_forgotten_when_it_is_over():
    ctx, seen = context(40, 2), seen_of((20, 20), (0.02, 0.02))
    more, planner = replace(seen, step_time=seen.step_time + 0.03), PerfModelPlanner()
    more.step_time[0] = np.nan
    worst = replace(seen, step_time=seen.step_time + 10)
    for rounds, one, expected in ((20, more, 0.05), (30, seen, 0.02), (20, worst, 0.02 * np.e), (30, seen, 0.02)):
        for _ in range(rounds):
            planner = planner.observe(one, ctx)
        assert planner.predict(even_plan(ctx), ctx) == pytest.approx(expected, rel=0.05)


def test_a_window_of_micro_batches_waits_for_what_was_measured_of_windows():
    ctx, seen = context(160, 8, accumulation=16), seen_of((20,) * 8, (0.02,) * 8, 200, 0.05)
    planner = replace(PerfModelPlanner().observe(seen, ctx), excess=0.0)
    assert planner.predict(even_plan(ctx), ctx) == pytest.approx(16 * seen.step_time.mean(), rel=0.01)


def test_times_of_a_checkpoint_that_are_no_times_are_refused_by_name():
    assert WorkerTimes.from_state_dict({}).names == ()
    for wrong in ([1.0], [np.nan] * 10):
        with pytest.raises(ValueError, match="size"):
            WorkerTimes.from_state_dict({"a": {**observed((10.0,), (0.1,)).state_dict()["a"], "size": wrong}})


def test_a_line_model_takes_as_long_as_predicted_at_the_optimum_and_a_jump_is_named():
    ctx, first, _ = changed((0.03, 0.031))
    plan, twice = first.planner.optimum(ctx), seen_of((20, 20), (0.04, 0.06))
    for planner in (first.planner, replace(first.planner, excess=0.3)):
        predicted = planner.predict(plan, ctx)
        assert planner.cluster(ctx).step_time(plan.local_batch_sizes) == pytest.approx(predicted, rel=0.01)
    again = PerfModelPlanner().observe(seen_of((20, 20), (0.02, 0.06)), ctx).decide(twice, even_plan(ctx), ctx)
    assert "rank 0 " in again.proposal.reason


def test_a_trial_counts_steps_since_a_jump_and_is_not_excused_by_an_odd_one():
    fast, slow = seen_of((20, 20), (0.02, 0.02), 16), seen_of((20, 20), (0.02, 0.04), 16)
    ctx = context(40, 2)
    known = PerfModelPlanner().observe(fast, ctx)
    for seen in (fast.followed_by(slow), seen_of((30, 10), (0.03, 0.01)).followed_by(fast).followed_by(slow)):
        assert known.decide(seen, even_plan(ctx), ctx).planner.trial.seconds == pytest.approx(0.04, rel=0.05)
    ctx, first, second = changed((0.06, 0.058))
    sizes = first.proposal.plan.local_batch_sizes
    odd = seen_of(sizes, (0.06, 0.058), 16)
    odd.forward[3] *= 10
    assert first.planner.decide(odd, first.proposal.plan, ctx).planner.credit < 0.7
    assert second.planner.credit < 0.6


def test_a_round_fades_what_was_known_once_and_a_jump_in_any_of_its_splits_counts():
    ctx, steady = replace(context(40, 2), elapsed=400), seen_of((20, 20), (0.02, 0.06))
    known = PerfModelPlanner(credit=0.5).observe(steady, ctx)
    assert (known.steps, known.observe(steady, replace(ctx, elapsed=None)).steps) == (400, 408)
    assert known.credit == pytest.approx(1 - 0.5 / np.e)
    two = seen_of((25, 15), (0.025, 0.045)).followed_by(seen_of((30, 10), (0.03, 0.03)))
    later, split = known.observe(two, ctx), BatchPlan(40, (30, 10))
    assert later.times.steps[0].tolist()[:3] == pytest.approx([8 / np.e, 8, 8])
    assert not later.times.jumped.any()
    jump = known.observe(seen_of((20, 20), (0.04, 0.06)).followed_by(two.rows(slice(8, None))), ctx)
    assert jump.times.jumped.tolist() == [True, False]
    for _ in range(40):
        later = later.observe(two, ctx)
    assert 0.005 < later.error(split, ctx) / later.predict(split, ctx) < 0.01


def test_a_trial_waits_for_three_steps_of_its_split():
    ctx, first, _ = changed((0.03, 0.031))
    assert first.planner.observe(seen_of((33, 7), (0.03, 0.031)), ctx).trial is None
    for seen in (seen_of((20, 20), (0.02, 0.06)), seen_of((33, 7), (0.03, 0.031), 2)):
        assert first.planner.observe(seen, ctx).trial == first.planner.trial
    new, seen, even = PerfModelPlanner(), seen_of((20, 20), (0.02, 0.06)), even_plan(ctx)
    few = new.observe(seen, ctx).decide(seen.rows(slice(2)), even, ctx)
    other = new.decide(seen_of((10, 10), (0.01, 0.03)), even_plan(context(20, 2)), ctx)
    for decision in (few, other):
        assert (decision.proposal is not None, decision.planner.trial) == (True, None)
    window = replace(ctx, accumulation=4)
    assert new.decide(seen, even, window).planner.trial.seconds == pytest.approx(4 * first.planner.trial.seconds)
    both = seen_of((30, 10), (0.03, 0.03)).followed_by(seen)
    assert new.decide(both, even, ctx).planner.trial.seconds == pytest.approx(first.planner.trial.seconds)


def test_no_trial_outlives_its_ranks_or_its_total():
    ctx, first, _ = changed((0.03, 0.031))
    other = replace(ctx, identities=("host-0", "host-9"))
    assert first.planner.observe(seen_of((20, 20), (0.02, 0.06)), other).trial is None
    assert first.planner.observe(seen_of((30, 30), (0.03, 0.09)), replace(ctx, total_batch_size=60)).trial is None
    assert first.planner.observe(seen_of((20, 20), (0.02, 0.06)), replace(ctx, accumulation=4)).trial is None


def test_a_gain_that_came_true_is_credited_in_windows_too():
    """The all-reduce takes as long as six micro-batches, and once for eight."""
    ctx = context(40, 2, accumulation=8)

    def seen(sizes, seconds):
        one = seen_of(sizes, seconds)
        return replace(one, last_sync=np.full_like(one.forward, 0.2))

    first = PerfModelPlanner().decide(seen((20, 20), (0.02, 0.06)), even_plan(ctx), ctx)
    assert first.planner.trial.gain < 0.5
    expected = first.planner.optimum(ctx).step_time
    plan = first.proposal.plan
    seconds = (expected - 0.2) / 8
    assert first.planner.decide(seen(plan.local_batch_sizes, (seconds, seconds)), plan, ctx).planner.credit > 0.95


def test_a_step_that_waits_for_the_link_is_measured_by_it():
    seen, ctx = seen_of((20, 20), (0.02, 0.06)), context(40, 2)
    seen = replace(seen, first_bucket=0.1 * seen.backward, overlapped_sync=np.full_like(seen.forward, 0.06))
    trial = PerfModelPlanner().decide(seen, even_plan(ctx), ctx).planner.trial
    assert trial.seconds == pytest.approx(0.02 + 0.1 * 0.04 + 0.06, rel=0.02)


@pytest.mark.parametrize(
    ("known", "seconds", "noise", "sizes"),
    [
        ({}, (0.07, 0.05), 0.01, (1, 3)),
        ({"min_local": (2, 1)}, (0.07, 0.05), 0.01, None),
        ({"max_local": (2, 2)}, (0.05, 0.07), 0.01, None),
        ({"max_local": (4, 2, 4)}, (0.07, 0.05, 0.052), 0.01, (1, 2, 3)),
        ({"hysteresis": 0.2}, (0.07, 0.05), 0.01, None),
        ({"change_cost": 1e6}, (0.07, 0.05), 0.01, None),
        ({}, (0.07, 0.05), 0.2, None),
        ({}, (0.07, 0.066), 1e-4, None),
    ],
)
def test_a_probe_has_to_pay_within_its_bounds(known, seconds, noise, sizes):
    ctx = context(2 * len(seconds), len(seconds), **known)
    found = PerfModelPlanner().decide(seen_of((2,) * len(seconds), seconds, noise=noise), even_plan(ctx), ctx)
    assert (found.proposal and found.proposal.plan.local_batch_sizes, found.planner.trial) == (sizes, None)
    assert found.soon == (sizes is not None), "what costs time for a sample is undone early"


def test_no_probe_where_another_total_is_asked_for_than_ran():
    decision = PerfModelPlanner().decide(seen_of((4, 4), (0.07, 0.0595)), even_plan(context(8, 2)), context(6, 2))
    assert decision.proposal is None


def test_a_change_pays_over_the_steps_that_ran_and_256_at_least():
    ctx = context(40, 2)
    for steps, saved in ((0.0, 25.6), (1000.0, 100.0)):
        pays = [PerfModelPlanner(steps=steps).pays(0.1, 1.0, replace(ctx, change_cost=saved * x)) for x in (0.99, 1.01)]
        assert pays == [True, False]
    assert changed((0.03, 0.031))[1].soon
    small = PerfModelPlanner().decide(
        seen_of((200, 200), (0.2, 0.206), 64), even_plan(context(400, 2)), context(400, 2)
    )
    assert (small.proposal is not None, small.soon) == (True, False)


def test_equal_workers_keep_equal_multiples(seed):
    rng, ctx = np.random.default_rng(seed), context(160, 3, multiple=32)
    plan = replace(even_plan(context(159, 3)), total_batch_size=160, local_batch_sizes=(64, 64, 32))
    moved = 0
    for _ in range(20):
        seen = seen_of(plan.local_batch_sizes, (0.064, 0.064, 0.032), noise=0.3, rng=rng)
        moved += PerfModelPlanner().decide(seen, plan, ctx).proposal is not None
    assert moved <= 4


# what a mutation of each branch showed to be untested


def test_a_change_is_not_blamed_for_a_speed_that_drifts():
    ctx, first, _ = changed((0.03, 0.031))
    drifting = replace(first.planner, times=replace(first.planner.times, drift=np.full(2, 8.0)))
    credits = [one.observe(seen_of((33, 7), (0.06, 0.058)), ctx).credit for one in (first.planner, drifting)]
    assert credits[0] < 0.6
    assert credits[1] > 0.95


def alternating(sizes, seconds, noise, steps=16):
    """Steps of workers that are shorter and longer by the same share in turns."""
    seen = seen_of(sizes, seconds, steps, 0.0)
    seen.forward[:] *= 1 + noise * np.tile([-1.0, 1.0], steps // 2)[:, None]
    seen.backward[:] *= 1 + noise * np.tile([-1.0, 1.0], steps // 2)[:, None]
    return seen


def test_the_more_workers_the_luckier_is_the_luckiest():
    """Half of the workers are 8 % slower: among four of them that is no luck, among 64 it may be."""
    moved = []
    for n in (4, 64):
        seen, ctx = alternating((100,) * n, np.where(np.arange(n) % 2 == 0, 0.108, 0.1), 0.035), context(100 * n, n)
        moved.append(PerfModelPlanner().decide(seen, even_plan(ctx), ctx).proposal is not None)
    assert moved == [True, False]


@pytest.mark.parametrize(
    ("sizes", "noise", "drift", "moves"),
    [
        ((200, 200), 0.06, 0.0, False),
        ((201, 199), 0.06, 0.0, True),
        ((201, 199), 0.1, 0.0, False),
        ((201, 199), 0.1, 8.0, True),
    ],
)
def test_what_unequal_workers_seem_to_gain_is_doubted_less_and_not_where_speeds_drift(sizes, noise, drift, moves):
    ctx, seen = context(400, 2), alternating(sizes, (0.1062, 0.1), noise)
    known = PerfModelPlanner().observe(seen, ctx)
    known = replace(known, times=replace(known.times, drift=np.full(2, drift)))
    assert (known.decide(StepObservations.empty(2), BatchPlan(400, sizes), ctx).proposal is not None) == moves


def test_many_workers_that_seem_to_drift_do_and_a_single_one_may_not():
    times = observed((10.0,), (0.1,), ("a", "b", "c", "d"))
    alone, all_of_them = replace(times, drift=np.array([2.0, -2, -2, -2])), replace(times, drift=np.full(4, 2.0))
    assert alone.drifting[0] < 0.5 < all_of_them.drifting[0]
    assert observed((10.0,), (0.1,)).drifting[0] < 0.1


def test_of_a_new_worker_little_is_known():
    ctx, planner = context(40, 2), PerfModelPlanner().observe(seen_of((20,), (0.02,)), context(20, 1))
    new, even = planner.error(even_plan(ctx), ctx), even_plan(ctx)
    known = planner.observe(seen_of((20, 20), (0.02, 0.02)), ctx)
    assert new > 1.5 * known.error(even, ctx) * planner.predict(even, ctx) / known.predict(even, ctx)


def test_below_the_sizes_that_ran_time_falls_by_some_of_what_is_usual_and_no_curve_is_steeper_than_its_samples():
    flat, steep = observed((20.0, 40.0), (0.1, 0.1)), observed((20.0, 40.0), (0.02, 0.2))
    at = [one.parts(np.array([b])).sum() for one in (flat, steep) for b in (10.0, 40.0, 80.0)]
    assert 0.85 < at[0] / at[1] < 0.98
    assert 1.0 <= at[2] / at[1] < 1.08
    assert at[5] / at[4] < 2.2


def test_sizes_that_a_drifting_worker_ran_at_other_speeds_tell_little_of_its_line():
    steady = observed((100.0, 90.0, 81.0), (0.1, 0.1, 0.1))
    drifts = replace(steady, drift=np.full(1, 8.0), level=np.full(1, 0.2))
    (at_30, at_100), (flat_30, flat_100) = (
        [one.parts(np.array([b])).sum() for b in (30.0, 100.0)] for one in (drifts, steady)
    )
    assert at_30 / at_100 < 0.6 < 0.75 < flat_30 / flat_100


def test_steps_within_the_usual_noise_are_no_events_and_an_odd_one_does_not_make_it():
    rng, size = np.random.default_rng(0), np.array([10.0])
    noisy = observed((10.0,) * 8, 0.1 * (1 + 0.25 * rng.standard_normal((8, 16, 1))).clip(0.1))
    long = np.full((8, 1), 0.1)
    long[0] = 0.19  # less than four deviations off
    with_it, without = (noisy.observe(size, one / 3, 2 * one / 3, 1000) for one in (long, 0 * long + 0.1))
    assert with_it.seconds.sum() > 1.04 * without.seconds.sum()
    odd = np.tile([0.099, 0.101], 8)[:, None]
    odd[3] = 0.138
    assert observed((10.0,), (odd,)).jitter[0] < 0.03


def test_one_round_tells_little_of_a_drift_and_many_not_for_ever():
    rounds = [0.1 * factor for factor in (1.0, 1.0, 1.5)]
    drift = [observed((10.0,) * n, rounds[:n]).drift[0] for n in (2, 3)]
    assert abs(drift[1] - drift[0]) <= 3.0
    steady = observed((10.0,) * 60, 0.1 * (1 + 0.03 * np.random.default_rng(0).standard_normal((60, 8, 1))), steps=8)
    assert -8.0 <= steady.drift[0] < 0.0


def test_link_times_of_more_workers_follow_the_ring_and_of_one_worker_nothing():
    assert LinkTimes({1: ((0.3, 0.0, 0.0),)}).at(4) == (0.3, 0.0, 0.0)
    assert LinkTimes().at(4) == (1.0, 0.0, 0.0)
    assert LinkTimes({2: ((0.1, 0.2, 0.02),)}).at(4) == pytest.approx((0.1, 0.3, 0.03))
    both = LinkTimes({2: ((0.1, 0.7, 0.0),), 4: ((0.3, 1.35, 0.0),)})  # latency 0.2, transfer 1
    assert both.at(8) == pytest.approx((0.2, 2.275, 0.0))


def test_reasons_name_what_is_known():
    ctx, first, _ = changed((0.03, 0.031))
    assert first.proposal.reason.startswith("first split")
    assert "% less" in first.proposal.reason
    again = first.planner.decide(seen_of((33, 7), (0.033, 0.09)), first.proposal.plan, ctx)
    assert "first split" not in again.proposal.reason
    doubtful, even = PerfModelPlanner(credit=0.5), even_plan(ctx)
    for name, known in (("hysteresis", {"hysteresis": 0.4}), ("cost", {"change_cost": 1e6})):
        kept = doubtful.decide(seen_of((20, 20), (0.02, 0.06)), even, replace(ctx, **known)).kept
        assert name in kept
        assert "believed" in kept
    probe = PerfModelPlanner().decide(seen_of((2, 2), (0.07, 0.05)), even_plan(context(4, 2)), context(4, 2))
    assert "% more" in probe.proposal.reason
    many = context(60, 6, max_local=(10,) * 6)
    kept = PerfModelPlanner().decide(seen_of((10,) * 6, (0.01,) * 6), even_plan(many), many).kept
    assert "0, 1, 2 and 3 more" in kept
    one = context(10, 1, max_local=(10,))
    assert "bound" not in PerfModelPlanner().decide(seen_of((10,), (0.01,)), even_plan(one), one).kept


@pytest.mark.parametrize(("fixed", "sizes"), [(0.0, (38, 2)), (0.1, (27, 13))])
def test_an_error_tells_that_a_size_was_never_run(fixed, sizes):
    """Sixty steps with almost no noise at 20/20 say little of other sizes."""
    ctx, speeds = context(40, 2), np.array([0.001, 0.003])
    planner = PerfModelPlanner().observe(seen_of((20, 20), fixed + 20 * speeds, 60, 0.002), ctx)
    plan, true = BatchPlan(40, sizes), float((fixed + sizes * speeds).max())
    assert abs(planner.predict(plan, ctx) - true) < 2 * planner.error(plan, ctx)
    assert planner.error(even_plan(ctx), ctx) < 0.02 * planner.predict(even_plan(ctx), ctx)


def test_of_two_splits_that_are_as_good_the_running_one_is_the_optimum():
    """The slowest worker is at its minimum; how the others share the rest does not matter."""
    ctx = context(9, 3)
    decision = PerfModelPlanner().decide(seen_of((5, 3, 1), (0.05, 0.03, 0.5), 16), BatchPlan(9, (5, 3, 1)), ctx)
    assert "luck" not in decision.kept
