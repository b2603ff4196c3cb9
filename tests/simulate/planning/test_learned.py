"""Answers of a simulated policy, against times written out once more."""

import json

import numpy as np
import pytest

from lightning_hetero.simulate.planning import (
    Cluster,
    Given,
    Worker,
    plan_cluster,
    read_cluster,
    simulate_cluster,
)
from lightning_hetero.simulate.planning.learned import learned_text

UNEQUAL = (Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0))


def by_hand(workers, sizes):
    return max((w.q + w.k) * b + w.s + w.m for w, b in zip(workers, sizes, strict=True))


def test_shares_are_those_of_the_splits_that_ran():
    answer = simulate_cluster(Cluster(UNEQUAL, total_batch_size=40), steps=60)
    optimum = min(by_hand(UNEQUAL, (b, 40 - b)) for b in range(1, 40))
    ends = [*(plan.step for plan in answer.plans[1:]), 60]
    times = np.concatenate(
        [
            np.full(end - plan.step, by_hand(UNEQUAL, plan.local_batch_sizes))
            for plan, end in zip(answer.plans, ends, strict=True)
        ]
    )
    assert answer.plans[0].local_batch_sizes == (20, 20)
    assert answer.optimum == pytest.approx(optimum)
    assert answer.share_of_optimum == pytest.approx(60 * optimum / times.sum())
    assert answer.share_at_the_end == pytest.approx(30 * optimum / times[30:].sum())
    assert answer.steps_to_5_percent == int(np.argmax(times <= 1.05 * optimum))
    assert answer.steps_to_1_percent == int(np.argmax(times <= 1.01 * optimum))
    assert answer.samples_per_second == pytest.approx(60 * 40 / answer.seconds)
    assert answer.seconds >= times.sum() - 1e-9


@pytest.mark.parametrize("name", ["A", "B", "C", "D-GPU-CPU"])
def test_the_learned_split_comes_near_the_planned_one(name):
    cluster = read_cluster(name, Given(workload="resnet50-imagenet", jitter=0.02, total_batch_size=256, rate=1e12))
    planned, learned = plan_cluster(cluster), simulate_cluster(cluster, steps=150)
    assert learned.share_at_the_end > 0.98
    assert learned.optimum == pytest.approx(planned.step_time, rel=1e-3)
    assert learned.steps_to_5_percent <= 60


def test_text_and_json_have_the_plans():
    answer = simulate_cluster(Cluster((*UNEQUAL, UNEQUAL[1])), 40, 40)
    text = learned_text(answer, "two kinds")
    assert text.startswith("two kinds: 3 workers, total batch 40, policy perf_model, 40 steps\n")
    assert "2 x slow" in text
    plain = json.loads(json.dumps(answer.to_dict()))
    assert plain["plans"][-1]["local_batch_sizes"] == list(answer.plans[-1].local_batch_sizes)
    assert "result" not in plain
