"""Answers of a simulated policy, against times written out once more."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.simulate.planning import (
    Cluster,
    Given,
    Link,
    Worker,
    plan_cluster,
    read_cluster,
    simulate_cluster,
)
from lightning_hetero.simulate.planning.learned import learned_text, link_profile

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


def test_equal_sizes_stay_with_the_policy_even():
    answer = simulate_cluster(Cluster(UNEQUAL), 40, 30, policy="even")
    assert [plan.local_batch_sizes for plan in answer.plans] == [(20, 20)]
    assert answer.steps_to_5_percent is None
    assert "not reached" in learned_text(answer)


def test_the_link_is_that_of_the_plan():
    rated = Link(4e6, 1e8, 1e-3, 4, 0.2)
    assert link_profile(rated, 3).seconds(3).sum() == pytest.approx(sum(rated.times(3)))
    measured = Link(gamma=0.2, t_o=0.03, t_u=0.01, measured_on=2)
    assert link_profile(measured, 2).seconds(2).tolist() == pytest.approx([0.01] * 4)
    assert link_profile(measured, 3).seconds(3).sum() == pytest.approx(0.04 * 4 / 3)


def test_text_and_json_have_the_plans():
    answer = simulate_cluster(Cluster((*UNEQUAL, UNEQUAL[1])), 40, 40)
    text = learned_text(answer, "two kinds")
    assert text.startswith("two kinds: 3 workers, total batch 40, policy perf_model, 40 steps\n")
    assert "2 x slow" in text
    plain = json.loads(json.dumps(answer.to_dict()))
    assert plain["plans"][-1]["local_batch_sizes"] == list(answer.plans[-1].local_batch_sizes)
    assert "result" not in plain


def test_the_seed_is_that_of_the_jitter():
    cluster = read_cluster("A", Given(workload="bert-squad", jitter=0.1, total_batch_size=32, rate=1e12))
    one, other, again = (simulate_cluster(cluster, steps=5, seed=seed).result.seconds for seed in (1, 2, 1))
    assert (one == again).all()
    assert (one != other).all()


@pytest.mark.parametrize("link", [Link(4e6, 1e8, gamma=0.3), Link(gamma=0.3, t_o=0.03, t_u=0.01, measured_on=2)])
def test_the_first_bucket_is_ready_as_early_as_in_the_plan(link):
    assert link_profile(link, 2).gamma == 0.3


def test_equal_devices_with_other_sizes_are_shown_as_a_range():
    answer = simulate_cluster(Cluster((*UNEQUAL, UNEQUAL[1])), 40, 5)
    text = learned_text(replace(answer, plans=(replace(answer.plans[0], local_batch_sizes=(20, 8, 12)),)))
    assert [line.split() for line in text.splitlines() if "slow" in line] == [["2", "x", "slow", "8-12"]]


def test_workers_of_a_simulation_keep_within_their_memory():
    small = replace(UNEQUAL[0], memory=25)
    assert simulate_cluster(Cluster((small, UNEQUAL[1])), 40, 40).plans[-1].local_batch_sizes == (25, 15)
