"""Answers as text: what is said of the worker that is missed least."""

import re
from dataclasses import replace

import pytest

from lightning_hetero.simulate.planning import Cluster, Link, Worker, plan_cluster
from lightning_hetero.simulate.planning.tables import compared_text, plan_text

FAST, SLOW = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (-0.25, "nobody: the one that is missed least, a slow, brings 25.0% of the speed"),
        (0.0005, "nobody: the one that is missed least, a slow, brings 0.0% of the speed"),
        (0.02, "a slow: the others are 2.0% faster without it"),
    ],
)
def test_leaving_out_a_worker_is_advised_for_a_gain_that_shows(gain, text):
    answer = plan_cluster(Cluster((FAST, FAST, SLOW), Link(4e6, 1e9)), 60)
    assert answer.leave_out == 2
    assert text in plan_text(replace(answer, gain_without_it=gain))


def test_a_row_is_of_all_workers_of_a_kind():
    fast = replace(FAST, memory=50)
    answer = plan_cluster(Cluster((fast, fast, SLOW), Link(4e6, 1e9)), 60)
    one, other, slow = answer.workers
    one = replace(one, local_batch_size=10, idle_share=0.1, memory_share=0.2, bottleneck="compute")
    other = replace(other, local_batch_size=20, idle_share=0.3, memory_share=0.4, bottleneck="communication")
    text = plan_text(replace(answer, workers=(one, other, slow)))
    (row,) = [line for line in text.splitlines() if line.startswith("2 x fast")]
    for shown in (" 10-20 ", " 20.0% ", " 40% of 50 ", "link and computing"):
        assert shown in row, row


def test_a_comparison_is_of_the_cluster_after_with_that_before():
    before, after = (
        plan_cluster(Cluster(workers).priced({"*": 36.0}), 60, samples=6000) for workers in ((SLOW,), (SLOW, FAST))
    )
    text = compared_text(before, after)
    gain = after.samples_per_second / before.samples_per_second
    assert gain > 1
    assert f"before the change: 1 worker, {before.samples_per_second:.4g} samples/s" in text
    assert f"the change makes it {gain:.3g} times as fast" in text
    assert f"an epoch costs {after.epoch.cost:.4g} in place of {before.epoch.cost:.4g}" in text


def test_a_fast_cluster_has_no_powers_of_ten():
    quick = replace(FAST, q=1e-6, s=0.0, k=1e-6)
    text = plan_text(plan_cluster(Cluster((quick, quick)).priced({"*": 123456.0}), 6000, samples=10**9))
    assert "samples/s" in text
    assert not re.search(r"\de[+-]\d", text), text
