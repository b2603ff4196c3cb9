"""Figures of a plan against another transcription of the equations, which tries all splits of small clusters."""

import math

import numpy as np
import pytest

from lightning_hetero.simulate.planning.cluster import Cluster, Link, Worker
from lightning_hetero.simulate.planning.figures import plan_cluster
from lightning_hetero.simulate.planning.without_one import step_time_without, times_without_one

NUMBER = 2000


def random_worker(rng, i):
    q, k = rng.uniform(1e-4, 1e-2, 2)
    s, m = rng.choice([0.0, 1e-3, 2e-2], 2)
    memory = int(rng.integers(3, 12)) if rng.random() < 0.3 else None
    return Worker(f"w{i}", q, s, k, m, memory, price=float(rng.integers(1, 5)))


def random_cluster(rng):
    count = int(rng.integers(1, 5))
    workers = [random_worker(rng, i) for i in range(count)]
    if count > 1 and rng.random() < 0.3:
        workers[1] = workers[0]
    rate = float(rng.choice([1e5, 1e6, 1e7, math.inf]))
    link = Link(float(rng.uniform(1e4, 1e6)), rate, float(rng.choice([0.0, 1e-3])), int(rng.integers(1, 6)))
    return Cluster(tuple(workers), link, samples=int(rng.integers(100, 10_000)))


def link_seconds(link, count, rate):
    """Seconds of all buckets but the last, and of the last."""
    if count == 1:
        return 0.0, 0.0
    sent = 2 * (count - 1) / count * link.gradient_bytes
    bucket = sent / link.buckets / rate + link.latency
    return bucket * (link.buckets - 1), bucket


def seconds(workers, sizes, link, rate):
    """C eq. 7, written out."""
    t_o, t_u = link_seconds(link, len(workers), rate)
    a = [w.q * b + w.s for w, b in zip(workers, sizes, strict=True)]
    p = [w.k * b + w.m for w, b in zip(workers, sizes, strict=True)]
    by_computing = max(x + y for x, y in zip(a, p, strict=True)) + t_u
    by_link = max(x + link.gamma * y for x, y in zip(a, p, strict=True)) + t_o + t_u
    return max(by_computing, by_link)


def best(workers, total, link, rate):
    """Least of the times of all splits with a sample at least for each worker that fit into memory."""
    most = np.array([min(w.memory or total, total) for w in workers])
    if len(workers) == 1:
        return seconds(workers, [total], link, rate) if most[0] >= total else math.inf
    grid = np.indices((total,) * (len(workers) - 1)).reshape(len(workers) - 1, -1) + 1
    sizes = np.vstack([grid, total - grid.sum(axis=0)])
    sizes = sizes[:, (sizes >= 1).all(axis=0) & (sizes <= most[:, None]).all(axis=0)]
    if not sizes.size:
        return math.inf
    q, s, k, m = (np.array([getattr(w, name) for w in workers])[:, None] for name in "qskm")
    a, p = q * sizes + s, k * sizes + m
    t_o, t_u = link_seconds(link, len(workers), rate)
    return float(np.maximum(a + p + t_u, a + link.gamma * p + t_o + t_u).max(axis=0).min())


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_another_transcription(seed):
    rng = np.random.default_rng(seed)
    compared = 0
    while compared < NUMBER // 4:
        cluster, total = random_cluster(rng), int(rng.integers(4, 13))
        workers, link = cluster.workers, cluster.link
        optimum = best(workers, total, link, link.rate)
        if math.isinf(optimum):
            with pytest.raises(ValueError, match="does not fit"):
                plan_cluster(cluster, total)
            continue
        compared += 1
        answer = plan_cluster(cluster, total)
        assert sum(answer.local_batch_sizes) == total
        assert answer.step_time == answer.expected_step_time == pytest.approx(optimum)
        assert answer.step_time == pytest.approx(seconds(workers, answer.local_batch_sizes, link, link.rate))
        assert answer.samples_per_second == pytest.approx(total / optimum)
        even = [total // len(workers) + (i < total % len(workers)) for i in range(len(workers))]
        if any(w.memory is not None and b > w.memory for w, b in zip(workers, even, strict=True)):
            assert answer.even_step_time is answer.speedup_over_even is None
        else:
            assert answer.speedup_over_even == pytest.approx(seconds(workers, even, link, link.rate) / optimum)
        alone = []
        for worker, part in zip(workers, answer.workers, strict=True):
            busy = (worker.q + worker.k) * part.local_batch_size + worker.s + worker.m
            assert part.idle_share == pytest.approx((optimum - busy) / optimum)
            parts = math.ceil(total / worker.memory) if worker.memory and worker.memory < total else 1
            alone.append(total / ((worker.q + worker.k) * total + parts * (worker.s + worker.m)))
            assert part.memory_share == (worker.memory and part.local_batch_size / worker.memory)
        assert [part.alone for part in answer.workers] == pytest.approx(alone)
        assert answer.share_of_alone == pytest.approx(total / optimum / sum(alone))
        hours = cluster.samples / total * optimum / 3600
        assert answer.epoch.cost == pytest.approx(hours * sum(w.price for w in workers))
        without_one(answer, workers, total, link, optimum)
        needed_rate(answer, workers, total, link, optimum)


def without_one(answer, workers, total, link, optimum):
    """What each worker brings, by solving again for the others."""
    if len(workers) == 1:
        assert answer.leave_out is None
        return
    others = [best([w for j, w in enumerate(workers) if j != i], total, link, link.rate) for i in range(len(workers))]
    for part, time in zip(answer.workers, others, strict=True):
        assert part.brings == pytest.approx(1 - optimum / time, abs=1e-9)
    if math.isinf(min(others)):
        assert answer.leave_out is answer.gain_without_it is None
    else:
        assert others[answer.leave_out] == pytest.approx(min(others))
        assert answer.without_it == pytest.approx(min(others))
        assert answer.gain_without_it == pytest.approx(optimum / min(others) - 1)


def needed_rate(answer, workers, total, link, optimum):
    """At the rate for 95 % the speed is that share of the speed with an infinite link, and just below it is less."""
    fastest = best(workers, total, link, math.inf)
    if math.isinf(link.rate):
        assert answer.link.share == 1
        assert answer.link.factor_needed is None
        assert (answer.link.rate_needed is None) == (len(workers) == 1)
    else:
        assert answer.link.share == pytest.approx(fastest / optimum)
    rate = answer.link.rate_needed
    if not rate:
        return
    assert best(workers, total, link, rate * (1 + 1e-6)) <= fastest / 0.95 * (1 + 1e-9)
    assert best(workers, total, link, rate * (1 - 1e-3)) > fastest / 0.95 * (1 - 1e-9)


def many(count, rng, kinds=None):
    pool = [Worker(f"w{i}", *rng.uniform(1e-3, 1e-2, 4)) for i in range(kinds or count)]
    return tuple(pool[i % len(pool)] for i in range(count))


def test_real_sizes_of_very_many_kinds_differ_by_less_than_a_sample(monkeypatch):
    rng = np.random.default_rng(0)
    for total in (400, 4000):
        cluster = Cluster(many(400, rng), Link(4e8, 1e9))
        whole, found = times_without_one(cluster, total)
        exact = np.array([step_time_without(cluster, i, total) for i in range(0, 400, 20)])
        a_sample = max(w.q + w.k for w in cluster.workers)
        assert np.all(found[::20] <= exact + 1e-9)
        assert np.all(exact - found[::20] <= a_sample)
        assert np.all(found >= whole - a_sample)


def test_a_worker_that_holds_up_the_others_is_left_out():
    fast = Worker("fast", 0.001, 0, 0.002, 0)
    answer = plan_cluster(Cluster((fast, fast, Worker("slow", 0.1, 1.0, 0.2, 1.0)), Link(4e3, 1e9)), 60)
    assert answer.workers[answer.leave_out].name == "slow"
    assert answer.gain_without_it > 10
    assert answer.leave_out_together == (2,)
    assert answer.workers[2].brings < 0


def test_jitter_and_errors_make_steps_longer():
    rng = np.random.default_rng(0)
    workers = tuple(Worker(f"w{i}", 0.001, 0.01, 0.002, 0.01, jitter=0.05) for i in range(8))
    answer = plan_cluster(Cluster(workers), 160)
    b = np.array(answer.local_batch_sizes)
    a, p = 0.001 * b + 0.01, 0.002 * b + 0.01
    drawn = a * (1 + 0.05 * rng.standard_normal((20000, 8))) + p * (1 + 0.05 * rng.standard_normal((20000, 8)))
    steps = drawn.max(axis=1)
    assert answer.expected_step_time == pytest.approx(steps.mean(), rel=2e-3)
    assert answer.step_time_error == pytest.approx(steps.std(), rel=0.03)
    assert answer.step_time < answer.expected_step_time
    assert answer.samples_per_second == pytest.approx(160 / answer.expected_step_time)
    assert [w.idle_share for w in answer.workers] == pytest.approx(1 - (a + p) / answer.step_time)
    epoch = plan_cluster(Cluster(workers), 160, samples=1000).epoch
    assert epoch.seconds == pytest.approx(1000 / 160 * answer.expected_step_time)
    one = plan_cluster(Cluster((Worker("w", 0.001, 0.01, 0.002, 0.01, error=0.1),)), 10)
    assert one.step_time_error == pytest.approx(0.1 * one.step_time, rel=5e-3)


def test_what_is_infinite_is_null_in_json():
    answer = plan_cluster(Cluster((Worker("w", 0.001, 0.01, 0.002, 0.01),)), 10).to_dict()
    assert answer["workers"][0]["brings"] == 1.0
    assert answer["link"]["rate"] is None
    assert answer["epoch"] is None


@pytest.mark.parametrize(
    ("total", "words"),
    [(None, "--total-batch"), (1, "a total of 2 at least"), (30, "a total of 20 at most")],
)
def test_a_total_that_cannot_run_is_refused(total, words):
    workers = (Worker("a", 0.001, 0, 0.002, 0, memory=10),) * 2
    with pytest.raises(ValueError, match=words):
        plan_cluster(Cluster(workers), total)


def test_each_worker_is_limited_by_what_asks_for_the_longer_step():
    workers = (Worker("back", 1e-4, 0, 5e-3, 0), Worker("front", 5e-3, 0, 1e-4, 0))
    link = Link(gamma=0.1, t_o=0.05, t_u=0.01, measured_on=2)
    answer = plan_cluster(Cluster(workers, link), 40)
    overlapped = [0.9 * w.k * part.local_batch_size for w, part in zip(workers, answer.workers, strict=True)]
    assert overlapped[0] > link.t_o > overlapped[1]
    assert [part.bottleneck for part in answer.workers] == ["compute", "communication"]
