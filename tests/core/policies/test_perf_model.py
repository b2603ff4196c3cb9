"""Policies in closed loop with simulated clusters: they see noisy times only, and are judged by the true ones."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.split_rule import RuleSettings, horizon
from lightning_hetero.core.timing.link_times import Level
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS
from tests.core.policies.simulated import (
    CLUSTER,
    FAST,
    MIDDLE,
    SLOW,
    context,
    drive,
    even_plan,
    excess,
    learned,
    measure,
    random_cluster,
    saving,
    slowed,
)
from tests.learned import knowing
from tests.quota import QuotaCluster

# -- the time model


@pytest.mark.parametrize("seed", range(25))
def test_optimum_is_reached_within_three_decisions(seed):
    cluster, rng = random_cluster(seed), np.random.default_rng(seed)
    ctx = context(64 * len(cluster.nodes), len(cluster.nodes))
    planner, plan, changes = drive(PerfModelPlanner(), cluster, even_plan(ctx), ctx, 3, rng)
    assert excess(cluster, plan) <= 0.03 + 0.01  # the hysteresis, and the noise
    _, later, more = drive(planner, cluster, plan, ctx, 20, rng)
    assert excess(cluster, later) <= 0.03 + 0.01
    assert len(changes) + len(more) <= 4


@pytest.mark.parametrize("seed", range(10))
def test_optimum_is_within_three_percent_with_little_hysteresis(seed):
    cluster, rng = random_cluster(seed), np.random.default_rng(seed)
    ctx = context(64 * len(cluster.nodes), len(cluster.nodes), hysteresis=0.005)
    _, plan, _ = drive(PerfModelPlanner(), cluster, even_plan(ctx), ctx, 3, rng)
    assert excess(cluster, plan) <= 0.03


@pytest.mark.parametrize("kind", ["perf_model", "pid"])
@pytest.mark.parametrize("seed", range(5))
def test_equal_workers_keep_the_even_split(kind, seed):
    cluster = ClusterTimeModel((MIDDLE,) * 4, 0.2, 0.02, 0.004)
    ctx = context(256, 4)
    _, plan, changes = drive(POLICIES[kind].factory(), cluster, even_plan(ctx), ctx, 20, np.random.default_rng(seed))
    assert changes == []
    assert plan == even_plan(ctx)


@pytest.mark.parametrize(("kind", "near", "bound"), [("perf_model", 0.03, 9), ("pid", 0.12, 14)])
@pytest.mark.parametrize("seed", range(5))
def test_slow_down_of_one_worker_is_followed_there_and_back(kind, near, bound, seed):
    rng, ctx = np.random.default_rng(seed), context(192, 3)
    planner, plan, changes = drive(POLICIES[kind].factory(), CLUSTER, even_plan(ctx), ctx, 8, rng)
    assert excess(CLUSTER, plan) <= near
    hindered = slowed(CLUSTER, 1, 10.0)
    planner, plan, during = drive(planner, hindered, plan, ctx, 8, rng)
    assert excess(hindered, plan) <= near
    assert during[0] == 0
    _, plan, after = drive(planner, CLUSTER, plan, ctx, 8, rng)
    assert excess(CLUSTER, plan) <= near
    assert after[0] == 0
    assert len(changes) + len(during) + len(after) <= bound


def test_a_split_that_is_little_better_pays_once_the_run_is_old():
    """6/4 takes 0.3 % less than 5/5: what has held so long is likely to hold as long again."""
    cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.001204, 0, 0, 0)))
    rng, ctx = np.random.default_rng(0), context(10, 2, change_cost=0.003)
    planner, plan, changes = drive(PerfModelPlanner(), cluster, even_plan(ctx), ctx, 8, rng, noise=0.0)
    assert changes == []
    old = replace(planner, steps=5000.0)
    _, plan, changes = drive(old, cluster, plan, ctx, 1, rng, noise=0.0)
    assert changes == [0]
    assert plan.local_batch_sizes == (6, 4)


@pytest.mark.parametrize(("steps", "moves"), [(8, True), (56, True), (64, False), (300, False), (1000, True)])
def test_a_young_run_changes_for_less(steps, moves):
    """6/4 takes 0.33 % less than 5/5, which is worth 0.47 of a step in 256, and more in a run that is older."""
    cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.001204, 0, 0, 0)))
    rng, ctx = np.random.default_rng(0), context(10, 2)
    planner = PerfModelPlanner(settings=RuleSettings(doubt=0.0)).observe(measure(cluster, (5, 5), rng, noise=0.0), ctx)
    planner, times = replace(planner, steps=float(steps)), planner.times.times(ctx.identities)
    decision = planner._decide(times, BatchPlan(10, (5, 5)), ctx, first=False)
    assert (decision.proposal is not None) is moves
    if not moves:
        assert decision.kept.startswith("a change would cost more than it saves")


@pytest.mark.parametrize(("noise", "whole"), [(0.01, False), (0.02, False), (0.08, True), (0.3, True)])
def test_doubt_is_whole_where_single_steps_scatter(noise, whole):
    """And where sizes are equal."""
    rng, ctx, plan = np.random.default_rng(1), context(192, 3), BatchPlan(192, (66, 64, 62))
    planner = PerfModelPlanner(settings=RuleSettings(doubt=1e4))
    planner = planner.observe(measure(CLUSTER, (64,) * 3, rng, steps=40, noise=noise), ctx)
    times = planner.times.times(ctx.identities)
    share = 1.0 if whole else (np.median(times.jitter) / 0.04) ** 2
    assert share == 1.0 if whole else share < 0.5
    equal, nearly = BatchPlan(192, (64, 64, 64)), BatchPlan(191, (64, 64, 63))
    for running, expected in ((plan, share), (BatchPlan(192, (65, 64, 63)), share), (equal, 1.0), (nearly, 1.0)):
        cluster = planner._prediction(times, ctx).model(np.array(running.local_batch_sizes))
        _, unknown = saving(planner, cluster, times, solve_optperf(cluster, 192), running, ctx)
        kept = planner._decide(times, running, ctx, first=False).kept
        least = float(re.search(r"only a gain of ([\d.]+)% is beyond luck", kept).group(1))
        assert least == pytest.approx(100 * 1e4 * unknown * expected, abs=0.051)


@pytest.mark.parametrize("noise", [0.007, 0.01, 0.015])
@pytest.mark.parametrize("workers", [32, 100])
def test_luck_moves_no_equal_workers_of_large_batches_in_quiet_steps(workers, noise):
    """Where whole samples are too fine to hide it."""
    equal, ctx = ClusterTimeModel((MIDDLE,) * workers, 0.2, 0.02, 0.004), context(1024 * workers, workers)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        assert drive(PerfModelPlanner(), equal, even_plan(ctx), ctx, 15, rng, noise=noise)[2] == []


def test_a_gain_that_equals_the_cost_is_left_and_one_that_equals_the_doubt_is_taken():
    rng, ctx, plan = np.random.default_rng(3), context(192, 3), BatchPlan(192, (64,) * 3)
    planner = PerfModelPlanner().observe(measure(CLUSTER, (64,) * 3, rng, noise=0.3), ctx)
    times = replace(planner.times.times(ctx.identities), moving=0.0)
    cluster = planner._prediction(times, ctx).model(np.array((64, 64, 64)))
    now, other = cluster.step_time((64, 64, 64)), solve_optperf(cluster, 192)
    gain, unknown = saving(planner, cluster, times, other, plan, ctx)
    free = RuleSettings(change_steps=0.0, doubt=0.0)
    saved = gain * now * horizon(gain, times.walks, times.probability, planner.steps, free)
    for seconds, moves in ((saved, False), (np.nextafter(saved, 0.0), True)):
        dear = replace(ctx, change_cost=float(seconds))
        found = replace(planner, settings=free)._decide(times, plan, dear, first=False)
        assert (found.proposal is not None) is moves
    ratio = gain / unknown
    just = next(x for x in (ratio, np.nextafter(ratio, 0.0), np.nextafter(ratio, 9e9)) if x * unknown == gain)
    for factor, moves in ((just, True), (1.000001 * just, False)):
        doubtful = replace(planner, settings=RuleSettings(change_steps=0.0, doubt=factor))
        assert (doubtful._decide(times, plan, ctx, first=False).proposal is not None) is moves


@pytest.mark.parametrize(("times", "soon"), [(3.0, True), (1.235, True), (1.215, False)])
def test_a_change_that_brings_much_is_looked_at_again_soon(times, soon):
    """Of 10 samples: where one worker is three times as slow, and where 6/4 takes 2.8 and 1.2 % less than 5/5."""
    nodes = NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.001 * times, 0, 0, 0)
    cluster, ctx = ClusterTimeModel(nodes), context(10, 2)
    seen = measure(cluster, (5, 5), np.random.default_rng(0), noise=0.0)
    decision = PerfModelPlanner().decide(seen, even_plan(ctx), ctx)
    assert decision.proposal is not None
    assert decision.soon is soon


def test_reason_names_the_rank_that_changed():
    rng, ctx = np.random.default_rng(0), context(192, 3)
    planner, plan, _ = drive(PerfModelPlanner(), CLUSTER, even_plan(ctx), ctx, 5, rng)
    obs = measure(slowed(CLUSTER, 1, 10.0), plan.local_batch_sizes, rng)
    assert "speed of rank 1 changed" in planner.decide(obs, plan, ctx).proposal.reason


@pytest.mark.parametrize(("hysteresis", "changed"), [(0.45, True), (0.55, False)])
def test_plan_changes_only_for_a_gain_above_the_hysteresis(hysteresis, changed):
    # (20, 20) takes 60 ms, the optimum (30, 10) takes 30 ms: a gain of one half
    cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.003, 0, 0, 0)))
    ctx = context(40, 2, hysteresis=hysteresis)
    _, proposal = PerfModelPlanner().decide(
        measure(cluster, (20, 20), np.random.default_rng(0), noise=0.0), even_plan(ctx), ctx
    )
    assert (proposal is not None) is changed


@pytest.mark.parametrize("hysteresis", [0.0, 0.03, 0.2])
def test_no_change_gains_less_than_the_hysteresis(hysteresis):
    rng, ctx = np.random.default_rng(1), context(192, 3, hysteresis=hysteresis)
    planner, plan = PerfModelPlanner(), even_plan(ctx)
    for _ in range(30):
        planner, proposal = planner.decide(measure(CLUSTER, plan.local_batch_sizes, rng, noise=0.05), plan, ctx)
        if proposal is not None:
            now, then = map(float, re.search(r"step ([\d.]+) -> ([\d.]+) ms", proposal.reason).groups())
            assert then == pytest.approx(1e3 * proposal.plan.step_time, abs=0.1)
            assert then <= (1 - hysteresis) * now + 0.1
            plan = proposal.plan


@pytest.mark.parametrize("hysteresis", [0.0, 0.03])
def test_a_gain_that_is_said_to_be_below_the_hysteresis_is(hysteresis):
    rng, ctx = np.random.default_rng(0), context(18, 3, hysteresis=hysteresis)
    eager = RuleSettings(doubt=0.0, change_steps=0.0)
    planner, plan, said = PerfModelPlanner(settings=eager), even_plan(ctx), []
    for _ in range(40):
        decision = planner.decide(measure(CLUSTER, plan.local_batch_sizes, rng, noise=0.2), plan, ctx)
        planner, plan = decision.planner, plan if decision.proposal is None else decision.proposal.plan
        said += [decision.kept] if "hysteresis" in (decision.kept or "") else []
    assert said
    for text in said:
        percent, than = re.search(r"([\d.]+)% (less|more)", text).groups()
        assert (float(percent) if than == "less" else -float(percent)) <= 100 * hysteresis + 0.1


def test_where_speeds_are_found_to_walk_a_change_waits_for_nothing():
    """The same times move the split where they are thought to come from walks, and not where from noise."""
    rng, ctx, plan = np.random.default_rng(0), context(512, 8), BatchPlan(512, (64,) * 8)
    equal, learned = ClusterTimeModel((MIDDLE,) * 8, 0.2, 0.02, 0.004), PerfModelPlanner()
    for _ in range(2):
        learned = learned.observe(measure(equal, (64,) * 8, rng, noise=0.3), ctx)
    moved = []
    for weight in ((0.5, 0.3, 0.2, 0.0, 0.0), (0.0, 0.0, 0.0, 0.5, 0.5)):
        planner = replace(learned, times=replace(learned.times, weight=np.repeat(np.array(weight)[:, None], 8, axis=1)))
        decision = planner._decide(planner.times.times(ctx.identities), plan, ctx, first=False)
        moved.append("moved" if decision.proposal else decision.kept.partition(":")[0])
    assert moved == ["too little is known of the workers yet", "moved"]


@pytest.mark.parametrize(("still", "moving"), [(0.9, 0.0), (0.52, 0.0), (0.4, 0.2), (0.0, 1.0)])
def test_a_decision_says_whether_speeds_more_likely_walk_than_stand_still(still, moving):
    rng, ctx = np.random.default_rng(0), context(192, 3)
    learned = PerfModelPlanner().observe(measure(CLUSTER, (64,) * 3, rng), ctx)
    walks = np.array(learned.times.settings.walks)
    weight = np.where(walks == walks.min(), still / (walks == walks.min()).sum(), 0.0)
    weight = np.where(walks == walks.max(), (1.0 - still) / (walks == walks.max()).sum(), weight)
    times = replace(learned.times, weight=np.repeat(weight[:, None], 3, axis=1))
    decision = replace(learned, times=times).decide(StepObservations.empty(3), BatchPlan(192, (64,) * 3), ctx)
    assert times.times(ctx.identities).moving == pytest.approx(moving)
    assert decision.moving is (moving > 0)


@pytest.mark.parametrize("moving", [0.0, 0.2, 0.4])
def test_a_gain_that_waits_is_named_with_the_least_that_would_do(moving):
    """The surer it is that speeds walk, the less."""
    rng, ctx, plan = np.random.default_rng(3), context(192, 3), BatchPlan(192, (64,) * 3)
    planner = PerfModelPlanner(settings=RuleSettings(doubt=12.0))
    planner = planner.observe(measure(CLUSTER, (64,) * 3, rng, noise=0.3), ctx)
    times = replace(planner.times.times(ctx.identities), moving=moving)
    cluster = planner._prediction(times, ctx).model(np.array((64, 64, 64)))
    gain, unknown = saving(planner, cluster, times, solve_optperf(cluster, 192), plan, ctx)
    kept = planner._decide(times, plan, ctx, first=False).kept
    found = re.search(r"would take ([\d.]+)% less, and only a gain of ([\d.]+)% is beyond luck", kept)
    least = 12.0 * unknown * (1.0 - moving)
    assert [float(number) for number in found.groups()] == pytest.approx([100 * gain, 100 * least], abs=0.051)
    assert gain < least


@pytest.mark.parametrize("workers", [2, 3, 4, 16, 100])
@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_luck_moves_no_equal_workers_whatever_their_number(workers, noise):
    """The largest of many estimates is partly luck: what it promises does not grow beyond doubt with their number."""
    equal, ctx = ClusterTimeModel((MIDDLE,) * workers, 0.2, 0.02, 0.004), context(64 * workers, workers)
    runs = 24 // min(workers, 8)
    changes = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        found = drive(PerfModelPlanner(), equal, even_plan(ctx), ctx, 12, rng, noise=noise)[2]
        changes.append(len(found))
    assert max(changes) <= 1
    assert sum(changes) <= 1


@pytest.mark.parametrize("doubt", [0.0, 1.5, 6.0])
def test_a_gain_has_to_exceed_what_is_not_known_by_the_doubt(doubt):
    rng, ctx = np.random.default_rng(3), context(192, 3)
    planner = PerfModelPlanner(settings=RuleSettings(doubt=doubt))
    sizes = (64, 64, 64)
    planner = planner.observe(measure(CLUSTER, sizes, rng, noise=0.3), ctx)
    plan, times = BatchPlan(192, sizes), planner.times.times(ctx.identities)
    cluster = planner._prediction(times, ctx).model(np.array(sizes))
    other = solve_optperf(cluster, 192)
    gain, unknown = saving(planner, cluster, times, other, plan, ctx)
    assert 1.5 * unknown < gain < 6.0 * unknown
    decision = planner._decide(times, plan, ctx, first=False)
    assert (decision.proposal is not None) is (gain >= doubt * unknown * (1 - times.moving))
    assert (decision.proposal is None) is (doubt == 6.0)


def test_what_pays_is_counted_over_all_steps_that_passed():
    """A small gain pays in a run of which a thousand steps have passed, though few of them were observed."""
    split, changed = BatchPlan(192, (109, 57, 26)), []
    for elapsed in (None, 1000):
        rng, planner, sizes = np.random.default_rng(3), PerfModelPlanner(), ((64, 64, 64), (109, 57, 26))
        ctx = context(192, 3, elapsed=elapsed, change_cost=8.0)
        for look in range(6):
            planner = planner.observe(measure(CLUSTER, sizes[min(look, 1)], rng, noise=0.01), ctx)
        assert planner.steps == 6 * (elapsed or 10)
        _, proposal = planner.decide(measure(CLUSTER, split.local_batch_sizes, rng, noise=0.01), split, ctx)
        changed.append(proposal is not None)
    assert changed == [False, True]  # 25 ms of 170 for 256 steps, or for 7000, against 8 s


def test_bounds_are_kept():
    ctx = context(192, 3, min_local=(1, 1, 40), max_local=(90, 100, 100))
    _, plan, _ = drive(PerfModelPlanner(), CLUSTER, even_plan(ctx), ctx, 4, np.random.default_rng(0))
    assert plan.local_batch_sizes[0] <= 90
    assert plan.local_batch_sizes[2] == 40


def test_a_better_split_of_another_total_is_compared_at_that_total():
    ctx = context(960, 3, hysteresis=0.01)
    observed = measure(CLUSTER, (32, 32, 32), np.random.default_rng(0))
    assert PerfModelPlanner().decide(observed, BatchPlan(96, (32, 32, 32)), ctx).proposal is not None


def test_accumulation_counts_the_whole_window():
    """The micro-batches before the last one hide no communication, so the optimum moves."""
    rng, ctx = np.random.default_rng(0), context(192, 3, accumulation=8)
    planner, plan, _ = drive(PerfModelPlanner(), CLUSTER, even_plan(ctx), ctx, 5, rng)
    assert excess(CLUSTER.accumulated(8), plan) <= 0.05
    window = CLUSTER.accumulated(8).step_time(plan.local_batch_sizes)
    assert planner.predict(plan, ctx) == pytest.approx(window, rel=0.05)


def test_under_accumulation_whole_windows_scatter():
    """Observed are means over the micro-batches of a window: these, not single micro-batches, are what scatters."""
    rng, ctx, n, workers = np.random.default_rng(0), context(160, 16, accumulation=4), 4, 16
    sizes, planner = np.full((32, workers), 10.0), PerfModelPlanner()
    for _ in range(4):
        a, p = (x * (1 + 0.2 * rng.standard_normal((n, 32, workers))) for x in (0.01, 0.02))
        windows, zeros = (a + p).sum(axis=0), np.zeros_like(sizes)
        waits = windows.max(axis=1, keepdims=True) - windows
        step = np.repeat(windows.max(axis=1, keepdims=True), workers, axis=1)
        seen = StepObservations(sizes, a.mean(axis=0), p.mean(axis=0), zeros, zeros, waits, step)
        planner = planner.observe(seen, ctx)
    plan = BatchPlan(160, (10,) * workers)
    assert planner.predict(plan, ctx) == pytest.approx(step.mean(), rel=0.02)
    unexplained = planner.residual.share * step.mean() + planner.residual.seconds
    assert abs(unexplained) < 0.03 * step.mean(), "what scatter explains is not the loop's own time"


def test_the_error_of_a_prediction_has_all_that_is_uncertain():
    """The workers' times, the link, and what the model leaves."""
    rng, ctx = np.random.default_rng(0), context(96, 3)
    plan, link = even_plan(ctx), {3: (Level(0.02, 0.0), Level(0.004, 0.0))}
    planner = PerfModelPlanner().observe(measure(CLUSTER, (32, 32, 32), rng, noise=0.001), ctx)
    sure = replace(planner, residual=Residual(0.0, 0.0, (0.0, 0.0, 0.0)), link=replace(planner.link, sync=link))
    workers = sure.error(plan, ctx)
    unsure = replace(sure.link, sync={3: (Level(0.02, 0.04), Level(0.004, 0.25))})
    assert replace(sure, link=unsure).error(plan, ctx) == pytest.approx(np.sqrt(workers**2 + 0.004**2 + 0.002**2))
    loop = replace(sure, residual=Residual(0.0, 0.0, (0.0, 0.0, 0.1**2)))
    assert loop.error(plan, ctx) == pytest.approx(np.hypot(workers, 0.1))


def test_steps_that_take_less_than_the_model_says_are_predicted_too():
    """Also where averaging takes no time from which seconds could be taken off."""
    rng, ctx, sizes = np.random.default_rng(0), context(96, 3), (60, 24, 12)
    cluster, planner = replace(CLUSTER, t_o=0.0, t_u=0.0), PerfModelPlanner()
    step = np.full((10, 3), 0.9 * cluster.step_time(sizes))
    for _ in range(20):
        planner = planner.observe(replace(measure(cluster, sizes, rng), step_time=step), ctx)
    assert planner.predict(BatchPlan(96, sizes), ctx) == pytest.approx(step[0, 0], rel=0.015)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_step_time_that_one_rank_lacks_is_left_out(rank):
    rng, ctx = np.random.default_rng(0), context(96, 3)
    seen = measure(CLUSTER, (32, 32, 32), rng)
    step = np.full(seen.forward.shape, CLUSTER.step_time((32, 32, 32)))
    whole = PerfModelPlanner().observe(replace(seen, step_time=step), ctx)
    step[4, rank] = np.nan
    lacks = PerfModelPlanner().observe(replace(seen, step_time=step), ctx)
    assert lacks.residual.seconds == pytest.approx(whole.residual.seconds, abs=1e-4)
    assert lacks.decide(seen, even_plan(ctx), ctx).proposal is not None


def test_prediction_is_the_true_time_after_two_sizes():
    rng, ctx = np.random.default_rng(0), context(192, 3)
    planner, plan, _ = drive(PerfModelPlanner(), CLUSTER, even_plan(ctx), ctx, 5, rng)
    true = CLUSTER.step_time(plan.local_batch_sizes)
    assert planner.predict(plan, ctx) == pytest.approx(true, rel=0.05)
    assert plan.step_time == pytest.approx(true, rel=0.05)


def test_a_plan_is_proposed_with_the_time_that_is_predicted_for_it():
    """What workers wait for each other's scatter is in it once, before and after."""
    nodes = tuple(NodeTimeModel(0.001 * speed, 0.0, 0.002 * speed, 0.0) for speed in (1, 1, 1, 2, 2, 2))
    rng, ctx = np.random.default_rng(0), context(300, 6)
    observed = measure(ClusterTimeModel(nodes, 0.2, 0.01, 0.004), (50,) * 6, rng, steps=200, noise=0.15)
    planner, proposal = PerfModelPlanner().decide(observed, even_plan(ctx), ctx)
    assert planner._prediction(planner._times(ctx), ctx).waiting_factor(np.full(6, 50.0)) > 1.06
    assert proposal.plan.step_time == pytest.approx(planner.predict(proposal.plan, ctx), rel=0.02)
    assert proposal.plan.step_time_error == pytest.approx(planner.error(proposal.plan, ctx))


def test_another_total_is_planned_from_what_is_known():
    rng, ctx = np.random.default_rng(0), context(192, 3)
    planner, plan, _ = drive(PerfModelPlanner(), CLUSTER, even_plan(ctx), ctx, 5, rng)
    larger = planner.initial(replace(ctx, total_batch_size=400))
    assert larger.plan.total_batch_size == 400
    assert excess(CLUSTER, larger.plan) <= 0.05


def test_a_decision_leaves_the_planner_as_it_was():
    planner, ctx = PerfModelPlanner(), context(192, 3)
    learned, _ = planner.decide(measure(CLUSTER, (64, 64, 64), np.random.default_rng(0)), even_plan(ctx), ctx)
    assert planner == PerfModelPlanner()
    assert learned != planner


# -- why the split stays


def pair(slower, scale=1.0, fixed=0.0):
    """Two workers, of which the second takes ``slower`` times as long."""
    nodes = [NodeTimeModel(scale * 4e-4 * x, fixed, scale * 6e-4 * x, 0.0) for x in (1.0, slower)]
    return ClusterTimeModel(tuple(nodes))


def kept(cluster, ctx, sizes, *, noise=0.0, seed=0, planner=None, steps=10):
    """The reason to keep these sizes, and the decision."""
    seen = measure(cluster, sizes, np.random.default_rng(seed), noise=noise, steps=steps)
    decision = (planner or PerfModelPlanner()).decide(seen, BatchPlan(sum(sizes), sizes), ctx)
    assert decision.proposal is None
    return decision.kept, decision


def test_nothing_is_said_of_workers_before_all_of_them_were_timed():
    few = "too few observations: not every worker's time is known"
    for planner in (PerfModelPlanner(), learned("perf_model", context(192, 3))):
        new = replace(context(192, 3), identities=("host-0", "host-1", "new"))
        assert planner.decide(StepObservations.empty(3), even_plan(new), new).kept == few


def test_equal_workers_are_said_to_be_equally_fast():
    same = "workers are equally fast: equal sizes are the optimum"
    assert kept(pair(1.0), context(40, 2), (20, 20))[0] == same
    assert kept(pair(1.0, scale=1e-2), context(40, 2), (20, 20))[0] == same, "also in steps of 0.2 ms"
    assert kept(pair(3.0), context(40, 2), (30, 10))[0] != same


@pytest.mark.parametrize(
    ("bounds", "sizes", "ranks"),
    [
        ({"max_local": (25, 40)}, (25, 15), "0"),
        ({"min_local": (1, 15)}, (25, 15), "1"),
        ({"min_local": (1, 20), "max_local": (20, 40)}, (20, 20), "0, 1"),
    ],
)
def test_a_rank_at_a_bound_is_named(bounds, sizes, ranks):
    said = f"bounds hold: rank {ranks} at its minimum or maximum; the split is the optimum"
    assert kept(pair(3.0), context(40, 2, **bounds), sizes)[0] == said


def test_a_split_that_is_the_optimum_is_said_to_be():
    said = "the optimum runs already: the time model predicts no shorter step with another split"
    assert kept(pair(3.0), context(40, 2), (30, 10))[0] == said


@pytest.mark.parametrize(("scale", "short"), [(1.0, False), (0.1, True)])
def test_a_change_that_costs_more_than_it_saves_is_said_with_both(scale, short):
    """22/18 takes 10 % less than 20/20; in a young run that counts for 256 steps at most."""
    cluster, ctx = pair(1.2222, scale), context(40, 2, change_cost=25.0 * 24.4e-3 * scale)
    text, decision = kept(cluster, ctx, (20, 20))
    planner, running, other = decision.planner, even_plan(ctx), BatchPlan(40, (22, 18))
    times = planner.times.times(ctx.identities)
    model = planner._prediction(times, ctx).model(np.array(running.local_batch_sizes))
    gain, _ = saving(planner, model, times, other, running, ctx)
    assert gain == pytest.approx(1.0 - cluster.step_time((22, 18)) / cluster.step_time((20, 20)), abs=0.005)
    steps = horizon(gain, times.walks, times.probability, planner.steps, planner.settings)
    now = model.step_time((20, 20))
    cost = planner.cost(now, ctx)
    assert gain * now * steps <= cost
    figures = re.search(r"22/18 would take ([\d.]+)% less for (\d+) steps, and costs ([\d.]+) ms", text)
    less, said, paid = map(float, figures.groups())
    assert less == pytest.approx(100 * gain, abs=0.051)
    assert said == pytest.approx(steps, abs=0.51)
    assert paid == pytest.approx(1e3 * cost, abs=0.051)
    assert text.startswith(
        "steps are too short to balance: they take 2.4 ms, 22/18 " if short else "a change would cost"
    )
    assert text.endswith("; a larger batch helps") is short


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize(("scale", "short"), [(10.0, False), (0.05, True)])
def test_a_gain_that_may_be_luck_is_said_with_the_jitter_that_makes_it_so(noise, scale, short):
    """As measured: the deviation of each worker's own steps, as a share of their mean."""
    ctx, doubtful = context(40, 2), PerfModelPlanner(settings=RuleSettings(doubt=15.0))
    seen = measure(pair(1.5, scale), (20, 20), np.random.default_rng(1), noise=noise, steps=400)
    decision = doubtful.decide(seen, even_plan(ctx), ctx)
    seconds = seen.outside_backward + seen.backward
    measured = np.sort(seconds.std(axis=0) / seconds.mean(axis=0))
    found = re.search(r"single steps vary by ([\d.]+)%(?: to ([\d.]+)%)?, \d+/\d+ would take", decision.kept).groups()
    said = [float(found[0]), float(found[1] or found[0])]
    assert said == pytest.approx(100 * measured, rel=0.1)
    kind, _, figures = decision.kept.partition(": ")
    assert kind == ("steps are too short to balance" if short else "too little is known of the workers yet")
    now = 1e3 * decision.planner.predict(even_plan(ctx), ctx)
    assert figures.startswith(f"they take {now:.1f} ms, the workers' single" if short else "their single")
    assert figures.endswith("is beyond luck; a larger batch helps" if short else "is beyond luck")


def test_the_page_of_questions_has_all_reasons_to_keep_a_split():
    root = Path(__file__).parents[3]
    answer = (root / "docs" / "faq.md").read_text().split("### The split stays equal")[1].split("\n### ")[0]
    rows = [row.strip("| ").split(" | ") for row in answer.splitlines() if row.startswith("| `")]
    sources = [
        root / "lightning_hetero" / "core" / "policies" / f"{name}.py" for name in ("perf_model", "split_reasons")
    ]
    code = "".join(source.read_text() for source in sources)
    named = {row[0].strip("`").split(":")[0].split("=")[0] for row in rows}
    assert all(f'"{name}' in code for name in named), "no reason that is not given"
    constants = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    given = {
        re.split("[:=]", text)[0] for text in constants if isinstance(text, str) and re.match(r"[a-z ]+[:=]", text)
    }
    assert given == named


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_gain_below_the_hysteresis_is_said_with_it(scale):
    """However short steps are: longer ones would not be split either."""
    cluster, ctx = pair(3.0, scale), context(40, 2, hysteresis=0.55)
    said = r"the predicted gain is below hysteresis=0\.55: 30/10 would take ([\d.]+)% less, waiting in single steps .*"
    found = re.fullmatch(said, kept(cluster, ctx, (20, 20))[0])
    saved = 1.0 - cluster.step_time((30, 10)) / cluster.step_time((20, 20))
    assert float(found.group(1)) == pytest.approx(100 * saved, abs=0.5)


# -- an earlier run


def test_what_an_earlier_estimator_wrote_is_learned_anew():
    planner = learned("perf_model", context(192, 3))
    assert planner.loaded({"profiles": {"host-0": {"points": []}}, "gamma": 0.2}) == PerfModelPlanner()


def test_hardware_that_is_all_new_starts_even():
    assert POLICIES["perf_model"].factory().initial(context(192, 3)) is None
    planner = learned("perf_model", context(192, 3))
    assert planner.initial(replace(context(192, 3), identities=("x", "y", "z"))) is None


@pytest.mark.parametrize("like", [0, 1, 2])
def test_one_new_worker_starts_as_the_known_one_that_is_most_like_it(like):
    """The others keep their models; it gets what its capacity promises."""
    planner = learned("perf_model", context(192, 3))
    capacities = (4.0, 1.0, 2.0)
    ctx = replace(
        context(192, 4),
        identities=("host-0", "host-1", "host-2", "new"),
        capacities=(*capacities, capacities[like]),
    )
    proposal = planner.initial(ctx)
    sizes = proposal.plan.local_batch_sizes
    assert abs(sizes[3] - sizes[like]) <= 1
    assert proposal.plan.step_time_error == planner.error(proposal.plan, ctx) > 0.0
    same = replace(CLUSTER, nodes=(*CLUSTER.nodes, CLUSTER.nodes[like]))
    assert excess(same, proposal.plan) <= 0.05
    assert "rank 3 is new" in proposal.reason
    faster = replace(ctx, capacities=(*capacities, 1.3 * capacities[like]))
    assert planner.initial(faster).plan.local_batch_sizes[3] > 1.12 * sizes[like]


def test_a_new_worker_of_which_nothing_is_known_is_taken_for_the_mean_of_the_others():
    planner = learned("perf_model", context(192, 3))
    ctx = replace(context(192, 4), identities=("host-0", "host-1", "host-2", "new"), capacities=())
    sizes = planner.initial(ctx).plan.local_batch_sizes
    assert min(sizes[:3]) < sizes[3] < max(sizes[:3])


# -- the link, and quotas


def test_scatter_alone_does_not_split_equal_workers():
    """Equal workers whose single steps scatter by 20 %: five steps promise a gain and prove nothing."""
    context = PlanContext(64, ("a", "b"), (1, 1))
    even = BatchPlan(64, (32, 32))
    zeros = np.zeros((5, 2))
    split = 0
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(1.0, 0.2, (5, 2))
        obs = StepObservations(np.full((5, 2), 32.0), zeros, 0.1 * noise, zeros, zeros, zeros, zeros)
        _, proposal = PerfModelPlanner().decide(obs, even, context)
        split += proposal is not None
    assert split <= 10


@pytest.mark.parametrize("own", [0.0, 0.010])
def test_a_worker_that_moves_data_slowly_gets_less_to_do(own):
    """Steps in which rank 2 comes last end ``own`` later after its arrival than those that wait for another."""
    rng, ctx = np.random.default_rng(0), context(192, 3, hysteresis=0.0)
    truth = replace(CLUSTER, nodes=(FAST, MIDDLE, replace(SLOW, s=SLOW.s + own)))

    def observed(sizes):
        seen = measure(CLUSTER, sizes, rng)
        ready = seen.forward + seen.backward
        late = ready.argmax(axis=1) == 2
        return replace(seen, last_sync=seen.last_sync + own * late[:, None])

    planner, plan = PerfModelPlanner(), even_plan(ctx)
    for _ in range(12):
        planner, proposal = planner.decide(observed(plan.local_batch_sizes), plan, ctx)
        plan = plan if proposal is None else proposal.plan
    assert excess(truth, plan) < 0.02
    blind = solve_optperf(CLUSTER, 192)
    assert (excess(truth, blind) > 0.04) == (own > 0)
    for sizes in (plan.local_batch_sizes, (64, 64, 64)):  # what is its own is not the link's as well
        assert planner.predict(BatchPlan(192, sizes), ctx) == pytest.approx(truth.step_time(sizes), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_scatter_of_the_link_does_not_hide_a_worker_that_slows(seed):
    """Steps end 2 to 30 ms after the last arrival, whoever that is; one worker of eight then takes a quarter more."""
    rng, ctx = np.random.default_rng(seed), context(240, 8, hysteresis=0.0)
    cluster = replace(CLUSTER, nodes=(FAST, FAST, MIDDLE, MIDDLE, *(SLOW,) * 4))
    planner, plan = PerfModelPlanner(), even_plan(ctx)

    def look(cluster):
        nonlocal planner, plan
        seen = measure(cluster, plan.local_batch_sizes, rng, steps=8)
        link = rng.uniform(0.002, 0.03, (8, 1)) - CLUSTER.t_u
        planner, proposal = planner.decide(replace(seen, last_sync=seen.last_sync + link), plan, ctx)
        plan = plan if proposal is None else proposal.plan

    for _ in range(24):
        look(cluster)
    assert excess(cluster, plan) < 0.02
    for _ in range(4):
        look(slowed(cluster, 1, 1.25))
    assert excess(slowed(cluster, 1, 1.25), plan) < 0.02


class CompressedExchange:
    """Two workers of 1.0 and 0.6 of a core whose step is compute, selection, one message, merging, on any link."""

    SPEEDS, FIXED, OWN = np.array([1.0, 0.6]), 2e-3, 1.5e-3

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def compute(self, sizes):
        return (self.FIXED + 2.5e-4 * np.asarray(sizes, float)) / self.SPEEDS

    def steps(self, sizes, link_seconds, count=16):
        shape = (count, 2)
        compute = self.compute(sizes) * np.exp(self.rng.normal(0.0, 0.05, shape))
        own = self.OWN / self.SPEEDS * np.exp(self.rng.normal(0.0, 0.05, shape))
        sends = compute + own / 2  # selection, then the message sets out
        link = link_seconds * np.exp(self.rng.normal(0.0, 0.1, (count, 1)))
        arrived = sends.max(axis=1, keepdims=True) + link
        done = arrived + own / 2
        step = np.tile(done.max(axis=1, keepdims=True), (1, 2))
        b = np.tile(np.asarray(sizes, float), (count, 1))
        zeros = np.zeros(shape)
        return StepObservations(b, compute / 3, 2 * compute / 3, 2 * compute / 3, zeros, done - compute, step)


@pytest.mark.parametrize("seed", range(4))
def test_a_link_that_fluctuates_does_not_move_the_split(seed):
    """Messages of 2 to 30 ms beside 12 ms of computing: what a link takes must never count as a worker's own."""
    cluster, ctx = CompressedExchange(seed), context(64, 2)
    planner, plan, splits = PerfModelPlanner(), BatchPlan(64, (32, 32)), []
    for _ in range(12):
        link = float(np.exp(cluster.rng.uniform(*np.log([2e-3, 30e-3]))))
        for _ in range(4):
            planner, proposal = planner.decide(cluster.steps(plan.local_batch_sizes, link), plan, ctx)
            plan = plan if proposal is None else proposal.plan
            splits.append(plan.local_batch_sizes[0])
    best = min(range(1, 64), key=lambda b: (cluster.compute((b, 64 - b)) + cluster.OWN / cluster.SPEEDS).max())
    assert all(abs(split - best) <= 3 for split in splits[8:]), (best, splits)


@pytest.mark.parametrize("kind", ["perf_model", "pid"])
@pytest.mark.parametrize("seed", range(4))
def test_workers_under_a_quota_come_near_the_best_split(kind, seed):
    """1.0, 0.5 and 0.3 of a core: single steps are bursts and waits, and those who wait for others look faster."""
    cluster, ctx, predicted = QuotaCluster(seed=seed), context(192, 3), None
    planner, plan = POLICIES[kind].factory(), BatchPlan(192, (64, 64, 64))
    for _ in range(12):
        planner, proposal = planner.decide(cluster.steps(plan.local_batch_sizes, 8), plan, ctx)
        predicted = planner.predict(plan, ctx)
        plan = plan if proposal is None else proposal.plan
    best = min(QuotaCluster().step_time(split) for split in ((109, 53, 30), (108, 54, 30), (110, 52, 30)))
    measured = QuotaCluster().step_time(plan.local_batch_sizes)
    assert best / measured >= (0.97 if kind == "perf_model" else 0.94)  # the controller stops within its dead band
    if kind == "perf_model":
        assert predicted == pytest.approx(measured, rel=0.03)


def test_step_times_under_a_quota_are_predicted_over_a_tenfold_range():
    """From every other total to those between: 2 % in the median, 5 % at most."""
    totals = (36, 54, 81, 120, 180, 260, 360)
    splits = {t: (t - round(0.28 * t) - round(0.17 * t), round(0.28 * t), round(0.17 * t)) for t in totals}
    cluster = QuotaCluster()
    rows = [cluster.steps(splits[t], 24) for _ in range(3) for t in totals[::2]]
    model = ClusterTimeModel.fit(
        StepObservations(*(np.concatenate([getattr(row, name) for row in rows]) for name in StepObservations.FIELDS))
    )
    errors = [abs(model.step_time(splits[t]) / cluster.step_time(splits[t]) - 1) for t in totals[1::2]]
    assert np.median(errors) <= 0.02
    assert max(errors) <= 0.05


def test_what_is_uncertain_of_a_workers_own_averaging_is_so_of_its_time():
    models = {"a": (0.001, 0.01, 0.002, 0.0), "b": (0.001, 0.01, 0.002, 0.0)}
    known, ctx = knowing(models, t_u=0.02), PlanContext(16, ("a", "b"), (1, 1))
    sure, unsure = (replace(known, arrivals={"a": (0.02, v), "b": (-0.02, v)}) for v in (1e-8, 3e-5))
    plan = BatchPlan(16, (8, 8))
    assert unsure.error(plan, ctx) > 2 * sure.error(plan, ctx)


def test_what_the_link_takes_is_measured_by_the_worker_that_comes_last():
    """It scales the walk of what is known of workers' own averaging; the others' seconds are waiting."""
    known = PerfModelPlanner(arrivals={"host-0": (0.02, 1e-8)})
    seen = measure(CLUSTER, (64, 64, 64), np.random.default_rng(0))
    last = np.tile([0.01, 0.3, 0.02], (len(seen.last_sync), 1))
    after = known.observe(replace(seen, last_sync=last), context(192, 3))
    walk = ESTIMATOR_DEFAULTS.skew_walk * 0.01
    assert after.arrivals["host-0"] == pytest.approx((0.02, 1e-8 + walk**2), rel=1e-9)


def test_a_workers_own_averaging_is_no_time_of_the_link_in_the_round_that_finds_it():
    """They take turns at being last, and one needs 0.2 s more each time."""
    seen, steps = measure(CLUSTER, (64, 64, 64), np.random.default_rng(0), steps=32), np.arange(32)[:, None]
    last = np.where(steps % 2, [0.6, 0.3, 0.6], [0.1, 0.5, 0.5])
    after = PerfModelPlanner().observe(replace(seen, last_sync=last), context(192, 3))
    assert after.link.at(3)[1] == pytest.approx(0.1, rel=0.05)


def test_a_step_takes_as_long_as_on_the_rank_where_it_takes_longest():
    ctx, seen = context(192, 3), measure(CLUSTER, (64, 64, 64), np.random.default_rng(0))
    longest = 1.2 * PerfModelPlanner().observe(seen, ctx).predict(even_plan(ctx), ctx)
    times = [longest * np.tile(shares, (10, 1)) for shares in ([1.0, 0.9, 1.0], [1.0, 1.0, 1.0], [0.9, 0.9, 0.9])]
    some, all_, less = (PerfModelPlanner().observe(replace(seen, step_time=t), ctx).residual for t in times)
    assert some == all_
    assert some.share > less.share
