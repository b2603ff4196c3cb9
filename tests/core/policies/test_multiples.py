"""Shares that are multiples: of every policy, at every decision, and of every total that moves."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.goodput import GoodputPlanner
from tests.core.policies.simulated import context, measure, random_cluster

NOISE = RunningNoiseScale().update(trace=900.0, global_sq_norm=1.0 + 900 / 48, total_batch_size=48)


def decisions(planner, cluster, conditions, plan, rng, number=6):
    """Plans and numbers of micro-batches, one decision after another."""
    for count in range(number):
        conditions = replace(conditions, epoch_begins=count % 2 == 0)
        planner, proposal = planner.decide(measure(cluster, plan.local_batch_sizes, rng), plan, conditions)
        plan = plan if proposal is None else proposal.plan
        accumulation = getattr(planner, "accumulation", 1)
        conditions = replace(conditions, total_batch_size=plan.total_batch_size, accumulation=accumulation)
        offered = [(one.total_batch_size, one.accumulation) for one in getattr(planner, "table", ())]
        assert all(total % (count * conditions.multiple) == 0 for total, count in offered)
        yield plan, accumulation


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("multiple", [2, 8])
@pytest.mark.parametrize("kind", ["perf_model", "pid", "static", "goodput"])
def test_every_share_is_a_multiple(kind, multiple, bounded):
    moved, totals = [], set()
    for seed in range(3):
        cluster, rng = random_cluster(seed), np.random.default_rng(seed)
        workers = len(cluster.nodes)
        most = tuple(multiple * int(units) for units in rng.integers(4, 9, workers)) if bounded else None
        start = BatchPlan(4 * multiple * workers, (4 * multiple,) * workers)
        total = start.total_batch_size
        conditions = context(
            *(total, workers),
            min_local=(multiple,) * workers,
            max_local=most,
            multiple=multiple,
            capacities=tuple(rng.uniform(1, 9, workers)),
            noise=NOISE,
        )
        planner = POLICIES[kind].factory() if kind != "goodput" else GoodputPlanner(10 * total, initial_total=total)
        first = planner.initial(conditions)
        plans = list(decisions(planner, cluster, conditions, first.plan if first else start, rng))
        for plan, _ in plans:
            assert all(size % multiple == 0 and size >= multiple for size in plan.local_batch_sizes)
            assert most is None or all(a <= b for a, b in zip(plan.local_batch_sizes, most, strict=True))
        moved += [plan.local_batch_sizes != start.local_batch_sizes for plan, _ in plans]
        totals |= {plan.total_batch_size * count / total for plan, count in plans}
    assert any(moved)
    assert (len(totals) > 1) == (kind == "goodput")
