"""Clusters that a user writes, and what is answered about them: files, units, and figures of a plan."""

import json
import math

import numpy as np
import pytest

from lightning_hetero.simulate import Cluster, Given, Link, Worker, plan_cluster, read_cluster, record
from lightning_hetero.simulate.planning import without_one as module
from tests.learned import knowing

FULL = """\
name: lab
workload: resnet50-imagenet
total_batch_size: 512
samples: 1.28M
link: {rate: 10Gbit, latency: 50us, buckets: 4, gamma: 0.2}
jitter: 0.03
price: {V100: 2.5, "*": 1}
workers:
  - A100
  - 4 x V100
  - device: RTX6000@50%
    count: 2
    memory: 100
    price: 0.5
  - {name: mine, q: 1e-3, s: 0.01, k: 2e-3, m: 0.01, memory: 64, error: 0.02, count: 3}
"""
ONE = "workers: [{q: 1, s: 0, k: 1, m: 0}]\n"


@pytest.fixture
def file(tmp_path):
    def _file(text, name="cluster.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return _file


def names(cluster):
    return [worker.name for worker in cluster.workers]


def test_a_file_says_it_all_and_options_go_before_it(file):
    cluster = read_cluster(file(FULL))
    assert cluster.name == "lab"
    assert names(cluster) == ["A100"] + ["V100"] * 4 + ["RTX6000@50%"] * 2 + ["mine"] * 3
    assert [w.price for w in cluster.workers] == [4.097] + [2.5] * 4 + [0.5] * 2 + [1.0] * 3
    assert [w.memory for w in cluster.workers[5:8]] == [100, 100, 64]
    assert [w.jitter for w in cluster.workers[:7]] == [0.03] * 7
    assert cluster.workers[-1] == Worker("mine", 1e-3, 0.01, 2e-3, 0.01, 64, 0.02, price=1.0)
    assert cluster.link == Link(102_400_000, 1.25e9, pytest.approx(50e-6), 4, 0.2)
    assert (cluster.total_batch_size, cluster.samples) == (512, 1_280_000)
    given = {"workload": "bert-squad", "gradient_bytes": 1e6, "rate": 1e6, "latency": 1.0, "jitter": 0.1}
    cluster = read_cluster(file(FULL), Given(**given, prices={"A100": 9.0}, total_batch_size=64, samples=10))
    assert (cluster.workers[0].jitter, cluster.workers[0].price) == (0.1, 9.0)
    assert (cluster.link.gradient_bytes, cluster.link.rate, cluster.link.latency) == (1e6, 1e6, 1.0)
    assert (cluster.total_batch_size, cluster.samples) == (64, 10)


def test_a_record_is_read_as_it_was_written_and_can_be_a_part_of_a_cluster(file):
    workers = (Worker("a", 1e-3, 0.01, 2e-3, 0.02, 64, 0.01, 0.02, 1.5), Worker("b", 2e-3, 0.0, 3e-3, 0.0))
    cluster = Cluster(workers, Link(4e6, 1e8, 1e-3, 4, 0.2), 100, 1000)
    path = file(json.dumps(record(cluster), indent="\t"), "run.json")
    again = read_cluster(path)
    assert (again.workers, again.total_batch_size, again.samples, again.link.gamma) == (workers, 100, 1000, 0.2)
    assert again.link.times(2) == pytest.approx(cluster.link.times(2))
    assert again.link.times(3) == pytest.approx([t * (4 / 3) for t in again.link.times(2)])
    assert again.link.effective_rate() == pytest.approx(4e6 / sum(cluster.link.times(2)))
    assert names(read_cluster(f"2x{path}", Given(total_batch_size=100))) == ["a", "b", "a", "b"]
    profiled = "workers:\n  - {profile: run.json, count: 2, name: mine}\n"
    inside = read_cluster(file(f"link: {{rate: 1Gbit, gamma: 0.3}}\ntotal_batch_size: 9\n{profiled}"))
    assert (names(inside), inside.samples) == (["mine"] * 4, 1000)
    assert (inside.link.gradient_bytes, inside.link.rate, inside.link.gamma) == (4e6, 125e6, 0.3)


def test_the_state_of_a_planner_is_read(file):
    true = {"one": (1e-3, 0.01, 2e-3, 0.02), "two": (3e-3, 0.01, 6e-3, 0.02)}
    planner = knowing(true, t_o=0.004, t_u=0.002, gamma=0.2)
    cluster = read_cluster(file(json.dumps(planner.state_dict()), "state.json"), Given(total_batch_size=40))
    assert names(cluster) == ["one", "two"]
    for worker, (q, s, k, m) in zip(cluster.workers, true.values(), strict=True):
        assert worker.seconds(20) == pytest.approx((q + k) * 20 + s + m, rel=0.03)
        assert 0 <= worker.error < 0.1
        assert 0 <= worker.jitter < 0.01
    assert cluster.link.gamma == pytest.approx(0.2, rel=0.05)
    assert cluster.link.times(2) == pytest.approx((0.004, 0.002), rel=0.05)
    assert plan_cluster(cluster).step_time > 0


BERT = "workload: bert-squad\nworkers: [A100]\n"


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 1, "empty"),
        ("workers: [A100\ntotal: 3", 2, "YAML"),
        ("workload: bert-squad\nworker:\n  - A100\n", 2, "Did you mean workers"),
        ("workers:\n  - A100\n", 2, "resnet50-imagenet"),
        ("workers:\n  - {q: 1, s: 0, k: x, m: 0}\n", 2, "workers[0].k"),
        ("workers:\n  - &x {q: 1, s: 0, k: 1, m: 0, <<: *x}\n", 2, "'<<'"),
        ('workers:\n  - {q: 1, s: 0, k: 1, m: 0, name: "a\\nb"}\n', 2, "control character"),
        ("workers: !!python/object/apply:os.system ['exit 1']\n", 1, "'exit 1'"),
        (f"{BERT}price:\n  A10: 3\n", 4, "Did you mean A100"),
        (f"version: 1\n{ONE}t_oo: 1\n", 3, "Did you mean t_o"),
    ],
)
def test_an_error_names_the_line_and_what_is_wrong(file, text, line, word):
    path = file(text)
    with pytest.raises(ValueError, match=r".") as error:
        read_cluster(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert word in message


UNITS = {"rate": "link: {rate: ", "latency": "link: {latency: ", "samples": "samples: ", "model": "model: "}


def with_unit(file, what, text):
    line = f"{UNITS[what]}{text}{'}' * UNITS[what].count('{')}"
    cluster = read_cluster(file(f"{line}\n{ONE}{'model: params=1M' * (what != 'model')}\n"))
    return {"samples": cluster.samples, "model": cluster.link.gradient_bytes}.get(what) or getattr(cluster.link, what)


def test_units_are_strict(file):
    for what, text, value in (
        *(("rate", "100Mbit", 12.5e6), ("rate", "3MB/s", 3e6), ("latency", "1.5ms", 1.5e-3)),
        *(("samples", "1.3B", 1_300_000_000), ("model", "params=124M", 496e6)),
    ):
        assert with_unit(file, what, text) == pytest.approx(value)
    for what, texts in (
        ("rate", ("100", "100mbit", "0Mbit", ".nan")),
        ("latency", ("1", "-1ms", "inf")),
        ("samples", ("0", "1.5", "124m")),
        ("model", ("124M", "params=")),
    ):
        for text in texts:
            with pytest.raises(ValueError, match=f":1: .*{what}"):
                with_unit(file, what, text)


# figures of a plan


def random_cluster(rng):
    count = int(rng.integers(1, 5))
    workers = []
    for i in range(count):
        (q, k), (s, m) = rng.uniform(1e-4, 1e-2, 2), rng.choice([0.0, 1e-3, 2e-2], 2)
        memory = int(rng.integers(3, 12)) if rng.random() < 0.3 else None
        workers.append(Worker(f"w{i}", q, s, k, m, memory, price=float(rng.integers(1, 5))))
    if count > 1 and rng.random() < 0.3:
        workers[1] = workers[0]
    rate = float(rng.choice([1e5, 1e6, 1e7, math.inf]))
    link = Link(float(rng.uniform(1e4, 1e6)), rate, float(rng.choice([0.0, 1e-3])), int(rng.integers(1, 6)))
    return Cluster(tuple(workers), link, samples=int(rng.integers(100, 10_000)))


def seconds(workers, sizes, link, rate):
    """C eq. 7 and the times of a ring, written out; sizes of many splits along the second axis."""
    sent = 2 * (len(workers) - 1) / len(workers) * link.gradient_bytes
    t_u = sent / link.buckets / rate + link.latency if len(workers) > 1 else 0.0
    t_o = t_u * (link.buckets - 1)
    q, s, k, m = (np.array([getattr(w, name) for w in workers])[:, None] for name in "qskm")
    a, p = q * sizes + s, k * sizes + m
    return np.maximum(a + p + t_u, a + link.gamma * p + t_o + t_u).max(axis=0)


def best(workers, total, link, rate):
    """Least of the times of all splits with a sample at least for each worker that fit into memory."""
    most = np.array([min(w.memory or total, total) for w in workers])
    sizes = np.array([[total]])
    if len(workers) > 1:
        grid = np.indices((total,) * (len(workers) - 1)).reshape(len(workers) - 1, -1) + 1
        sizes = np.vstack([grid, total - grid.sum(axis=0)])
    sizes = sizes[:, (sizes >= 1).all(axis=0) & (sizes <= most[:, None]).all(axis=0)]
    return float(seconds(workers, sizes, link, rate).min()) if sizes.size else math.inf


def test_figures_are_those_of_another_transcription_that_tries_all_splits(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        cluster, total = random_cluster(rng), int(rng.integers(4, 13))
        workers, link = cluster.workers, cluster.link
        optimum = best(workers, total, link, link.rate)
        if math.isinf(optimum):
            with pytest.raises(ValueError, match="does not fit"):
                plan_cluster(cluster, total)
            continue
        answer = plan_cluster(cluster, total)
        sizes = np.array(answer.local_batch_sizes)
        assert sizes.sum() == total
        assert answer.step_time == answer.expected_step_time == pytest.approx(optimum)
        assert answer.step_time == pytest.approx(seconds(workers, sizes[:, None], link, link.rate)[0])
        assert answer.samples_per_second == pytest.approx(total / optimum)
        even = [total // len(workers) + (i < total % len(workers)) for i in range(len(workers))]
        if any(w.memory is not None and b > w.memory for w, b in zip(workers, even, strict=True)):
            assert answer.even_step_time is answer.speedup_over_even is None
        else:
            slowest = seconds(workers, np.array(even)[:, None], link, link.rate)[0]
            assert answer.speedup_over_even == pytest.approx(slowest / optimum)
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
    assert [part.brings for part in answer.workers] == pytest.approx([1 - optimum / time for time in others], abs=1e-9)
    if math.isinf(min(others)):
        assert answer.leave_out is answer.gain_without_it is None
    else:
        assert others[answer.leave_out] == pytest.approx(min(others))
        assert answer.without_it == pytest.approx(min(others))
        assert answer.gain_without_it == pytest.approx(optimum / min(others) - 1)


def test_what_each_of_very_many_workers_brings_is_solved_in_real_numbers(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    draws = [(f"w{i}", *rng.uniform(1e-4, 1e-2, 4)) for i in range(12)]
    workers = tuple(Worker(*draw, memory=2000 if i % 4 == 3 else None) for i, draw in enumerate(draws))
    cluster, found = Cluster(workers, Link(1e5, 1e7)), []
    for exact in (10**9, 0):
        monkeypatch.setattr(module, "EXACT", exact)
        found.append([worker.brings for worker in plan_cluster(cluster, 10_000).workers])
    assert found[1] == pytest.approx(found[0], rel=0.01, abs=1e-4)
    assert max(found[0]) > 0.1


def needed_rate(answer, workers, total, link, optimum):
    """At the rate for 95 % the speed is that share of the speed with an infinite link, and just below it is less."""
    fastest = best(workers, total, link, math.inf)
    if math.isinf(link.rate):
        assert (answer.link.share, answer.link.factor_needed) == (1, None)
        assert (answer.link.rate_needed is None) == (len(workers) == 1)
    else:
        assert answer.link.share == pytest.approx(fastest / optimum)
    if rate := answer.link.rate_needed:
        assert best(workers, total, link, rate * (1 + 1e-6)) <= fastest / 0.95 * (1 + 1e-9)
        assert best(workers, total, link, rate * (1 - 1e-3)) > fastest / 0.95 * (1 - 1e-9)


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
    answer = plan_cluster(Cluster(workers), 160, samples=1000)
    b = np.array(answer.local_batch_sizes)
    a, p = 0.001 * b + 0.01, 0.002 * b + 0.01
    steps = (a * rng.normal(1, 0.05, (20000, 8)) + p * rng.normal(1, 0.05, (20000, 8))).max(axis=1)
    assert answer.step_time < answer.expected_step_time == pytest.approx(steps.mean(), rel=2e-3)
    assert answer.step_time_error == pytest.approx(steps.std(), rel=0.03)
    assert answer.epoch.seconds == pytest.approx(1000 / 160 * answer.expected_step_time)
    one = plan_cluster(Cluster((Worker("w", 0.001, 0.01, 0.002, 0.01, error=0.1),)), 10)
    assert one.step_time_error == pytest.approx(0.1 * one.step_time, rel=5e-3)
    json.dumps(one.to_dict(), allow_nan=False)  # a link without a limit is null
