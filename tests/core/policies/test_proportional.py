"""Proportional control as a policy: its starts, the steps it decides on, and what it remembers."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.timing.winsorized_mean import winsorize_top
from tests.core.policies.simulated import CLUSTER, FAST, SLOW, context, drive, even_plan, learned, measure


def test_proportional_control_starts_unknown_hardware_by_its_capacity():
    """Dynamic mini-batching starts open-loop: shares by cores or peak figures until it knows the workers."""
    planner = learned("pid", context(192, 3))
    for unknown in (planner, POLICIES["pid"].factory()):
        new = replace(context(192, 3), identities=("host-0", "host-1", "new"), capacities=(2.0, 1.0, 1.0))
        assert unknown.initial(new).plan.local_batch_sizes == (96, 48, 48)


@pytest.mark.parametrize("seed", range(5))
def test_proportional_makes_compute_times_equal(seed):
    ctx = context(192, 3)
    planner, plan, changes = drive(
        ProportionalPlanner(), CLUSTER, even_plan(ctx), ctx, 20, np.random.default_rng(seed), noise=0.03
    )
    times = [node.compute_time(b) for node, b in zip(CLUSTER.nodes, plan.local_batch_sizes, strict=True)]
    assert max(times) / min(times) < 1.15
    assert len(changes) <= 5
    assert planner.predict(plan, ctx) is None


def test_proportional_leaves_out_steps_that_ran_at_other_sizes():
    ctx = context(40, 2)
    cluster = ClusterTimeModel((FAST, SLOW))
    obs = measure(cluster, (30, 10), np.random.default_rng(0))
    planner, proposal = ProportionalPlanner().decide(obs, even_plan(ctx), ctx)
    assert proposal is None
    assert planner.state.times.smoothed == ()


def at(sizes, steps=5):
    """Steps without noise on a worker that is three times as fast as the other."""
    cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0.002, 0), NodeTimeModel(0.003, 0, 0.006, 0)), 0.2, 0.0, 0.0)
    return measure(cluster, sizes, np.random.default_rng(0), steps=steps, noise=0.0)


def test_proportional_starts_by_what_it_knows_then_by_what_is_given_then_by_capacities():
    known, free = {"host-0": 300.0, "host-1": 100.0}, context(40, 2, capacities=(1.0, 4.0))
    given, bare = replace(free, given=(25, 15)), replace(free, capacities=())
    sizes = {
        (len(throughput), start, i): proposal and proposal.plan.local_batch_sizes
        for throughput in ({}, {"host-0": 300.0}, known)
        for start in ("open_loop", "equal")
        for i, where in enumerate((free, given, bare))
        for proposal in [ProportionalPlanner(throughput=throughput, start=start).initial(where)]
    }
    for number in (0, 1):
        assert [sizes[number, "open_loop", i] for i in range(3)] == [(8, 32), (25, 15), None]
        assert [sizes[number, "equal", i] for i in range(3)] == [None, (25, 15), None]
    assert {sizes[2, start, i] for start in ("open_loop", "equal") for i in range(3)} == {(30, 10)}


def test_proportional_decides_on_five_steps_at_the_sizes_that_run():
    planner, where = ProportionalPlanner(), context(40, 2)
    decision = planner.decide(at((20, 20), 4), BatchPlan(40, (20, 20)), where)
    assert decision.proposal is None
    assert decision.kept == "too few observations: 4 steps at these sizes, of 5 that it takes"
    planner = decision.planner
    assert planner.decide(at((20, 20), 1), BatchPlan(40, (20, 20)), where).proposal is not None
    moved = planner.decide(at((24, 16), 1), BatchPlan(40, (24, 16)), where)
    assert moved.kept.startswith("too few observations: 1 steps")


def test_proportional_counts_steps_of_a_worker_that_runs_more_than_its_share():
    """As the fewest samples that it can run, which exceed what it was given."""
    decision = ProportionalPlanner().decide(at((8, 36)), BatchPlan(40, (4, 36)), context(40, 2, min_local=(8, 1)))
    assert decision.proposal is not None


def test_proportional_remembers_the_newest_throughput_of_each_worker():
    before = ProportionalPlanner(throughput={"host-0": 1.0, "elsewhere": 7.0})
    after = before.decide(at((30, 10)), BatchPlan(40, (30, 10)), context(40, 2))
    assert after.proposal is None
    assert "equally fast" in after.kept
    assert after.planner.throughput == {
        "elsewhere": 7.0,
        "host-0": pytest.approx(1 / 0.003),
        "host-1": pytest.approx(1 / 0.009),
    }


def test_proportional_keeps_bounds_and_its_dead_band():
    where, plan = context(40, 2, max_local=(25, 40)), BatchPlan(40, (20, 20))
    assert ProportionalPlanner().decide(at((20, 20)), plan, where).proposal.plan.local_batch_sizes == (25, 15)
    assert ProportionalPlanner(dead_band=0.6).decide(at((20, 20)), plan, context(40, 2)).proposal is None


def test_proportional_smooths_as_it_is_told_to():
    """With no weight of the past, the last step is what counts; the longest counts as much as the next one."""
    steps = measure(CLUSTER, (64, 64, 64), np.random.default_rng(0), steps=4, noise=0.2)
    plan, where = BatchPlan(192, (64, 64, 64)), context(192, 3)
    last = ProportionalPlanner(decay=0.0).decide(steps, plan, where).planner
    assert last.state.times.smoothed == pytest.approx(winsorize_top(steps.compute)[-1])
