"""What a user writes: files, lists of devices, units; errors name the line, what is allowed, and the nearest."""

import json
import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.simulate.planning import Cluster, Given, Link, Worker, plan_cluster, read_cluster, record
from lightning_hetero.simulate.planning.document import DocumentError
from lightning_hetero.simulate.planning.units import (
    parse_bytes,
    parse_count,
    parse_model,
    parse_number,
    parse_prices,
    parse_rate,
    parse_seconds,
)

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


@pytest.fixture
def file(tmp_path):
    def _file(text, name="cluster.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return _file


def test_a_file_says_it_all(file):
    cluster = read_cluster(file(FULL))
    assert cluster.name == "lab"
    assert [w.name for w in cluster.workers] == ["A100"] + ["V100"] * 4 + ["RTX6000@50%"] * 2 + ["mine"] * 3
    assert [w.price for w in cluster.workers] == [4.097] + [2.5] * 4 + [0.5] * 2 + [1.0] * 3
    assert [w.memory for w in cluster.workers[5:8]] == [100, 100, 64]
    assert [w.jitter for w in cluster.workers[:7]] == [0.03] * 7
    assert cluster.workers[-1] == Worker("mine", 1e-3, 0.01, 2e-3, 0.01, 64, 0.02, price=1.0)
    assert cluster.link == Link(102_400_000, 1.25e9, pytest.approx(50e-6), 4, 0.2)
    assert (cluster.total_batch_size, cluster.samples) == (512, 1_280_000)


def test_options_go_before_the_file(file):
    given = Given(
        workload="bert-squad", gradient_bytes=1e6, rate=1e6, latency=1.0, jitter=0.1, prices={"A100": 9.0},
        total_batch_size=64, samples=10,
    )  # fmt: skip
    cluster = read_cluster(file(FULL), given)
    assert cluster.workers[0].jitter == 0.1
    assert cluster.workers[0].price == 9.0
    assert cluster.workers[0].q == read_cluster("A100", Given(workload="bert-squad")).workers[0].q
    assert (cluster.link.gradient_bytes, cluster.link.rate, cluster.link.latency) == (1e6, 1e6, 1.0)
    assert (cluster.total_batch_size, cluster.samples) == (64, 10)


def test_a_record_is_read_as_it_was_written(file):
    workers = (Worker("a", 1e-3, 0.01, 2e-3, 0.02, 64, 0.01, 0.02, 1.5), Worker("b", 2e-3, 0.0, 3e-3, 0.0))
    cluster = Cluster(workers, Link(4e6, 1e8, 1e-3, 4, 0.2), 100, 1000)
    again = read_cluster(file(json.dumps(record(cluster), indent="\t"), "run.json"))
    assert again.workers == workers
    assert (again.total_batch_size, again.samples, again.link.gamma) == (100, 1000, 0.2)
    assert again.link.times(2) == pytest.approx(cluster.link.times(2))
    assert again.link.times(3) == pytest.approx([t * (4 / 3) for t in again.link.times(2)])
    assert again.link.effective_rate() == pytest.approx(4e6 / sum(cluster.link.times(2)))
    assert plan_cluster(again).step_time == pytest.approx(plan_cluster(cluster).step_time)
    named = read_cluster(f"2x{file(json.dumps(record(cluster)), 'run.json')}", Given(total_batch_size=100))
    assert [w.name for w in named.workers] == ["a", "b", "a", "b"]
    assert (named.link.gradient_bytes, named.link.gamma, named.samples) == (4e6, 0.2, 1000)
    text = "link: 1Gbit\ntotal_batch_size: 9\nworkers:\n  - profile: run.json\n    count: 2\n    name: mine\n"
    inside = read_cluster(file(text))
    assert [w.name for w in inside.workers] == ["mine"] * 4
    assert (inside.link.gradient_bytes, inside.link.rate, inside.samples) == (4e6, 125e6, 1000)


def test_the_state_of_a_planner_is_read(file):
    true = np.array([[1e-3, 0.01, 2e-3, 0.02], [3e-3, 0.01, 6e-3, 0.02]])
    rng, planner = np.random.default_rng(0), PerfModelPlanner()
    for sizes in ([20, 20], [30, 10], [28, 12]):
        b = np.tile(np.array(sizes, dtype=float), (8, 1)) + 0.0
        jitter = 1 + 0.01 * rng.standard_normal((8, 2, 2))
        forward = (true[:, 0] * b + true[:, 1]) * jitter[:, :, 0]
        backward = (true[:, 2] * b + true[:, 3]) * jitter[:, :, 1]
        zeros = np.zeros_like(b)
        seen = StepObservations(b, forward, backward, 0.2 * backward, zeros + 0.004, zeros + 0.002, forward + backward)
        current = BatchPlan(40, tuple(sizes))
        planner = planner.decide(seen, current, PlanContext(40, ("one", "two"), (1, 1))).planner or planner
    cluster = read_cluster(file(json.dumps(planner.state_dict()), "state.json"), Given(total_batch_size=40))
    assert [w.name for w in cluster.workers] == ["one", "two"]
    for worker, (q, s, k, m) in zip(cluster.workers, true, strict=True):
        assert worker.seconds(20) == pytest.approx((q + k) * 20 + s + m, rel=0.03)
        assert 0 < worker.error < 0.1
        assert worker.jitter == pytest.approx(0.01, rel=0.5)
    assert cluster.link.gamma == pytest.approx(0.2, rel=0.05)
    assert cluster.link.times(2) == pytest.approx((0.004, 0.002), rel=0.05)
    assert plan_cluster(cluster).step_time > 0


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, ["the file is empty"]),
        ("workers: [A100\ntotal: 3", 2, ["no YAML"]),
        ("workload: bert-squad\nworker:\n  - A100\n", 2, ["unknown key 'worker'", "Did you mean workers", "samples"]),
        ("workload: bert-squat\nworkers: [A100]\n", 1, ["workload: ", "'bert-squat'", "Did you mean bert-squad"]),
        ("workload: bert-squad\nworkers:\n  - A100\n  - A10\n", 4, ["workers[1]", "'A10'", "Did you mean A100"]),
        ("workers:\n  - A100\n", 2, ["workers[0]", "depends on the model", "resnet50-imagenet"]),
        ("workers:\n  - {q: 1, s: 0, k: 1}\n", 2, ["workers[0]", "'m' is missing", "q, s, k, m"]),
        (
            "workers:\n  - q: 1\n    s: -1\n    k: 1\n    m: 0\n",
            3,
            ["workers[0].s", "'-1' is negative", "from 0 to 1e+09"],
        ),
        ("workers:\n  - {q: 0, s: 1, k: 0, m: 0}\n", 2, ["workers[0]", "q + k"]),
        ("workers:\n  - {q: 1, s: 0, k: x, m: 0}\n", 2, ["workers[0].k", "'x' is not a number"]),
        ("workers:\n  - {q: 1, s: 0, k: 1, m: 0, memry: 2}\n", 2, ["'memry'", "Did you mean memory"]),
        ("workers:\n  - {q: 1, s: 0, k: 1, m: 0, q: 2}\n", 2, ["'q' is given twice"]),
        ("workers: []\n", 1, ["the list is empty"]),
        ("workers: A100\n", 1, ["give a list here"]),
        ("total_batch_size: 3\n", 1, ["'workers' is missing"]),
        ("link: 100mbit\nworkers: [A100]\nworkload: bert-squad\n", 1, ["link: ", "unit mbit", "Did you mean Mbit"]),
        ("link: 100\nworkers: [A100]\nworkload: bert-squad\n", 1, ["link: ", "'100' has no unit", "100Mbit"]),
        ("link: .nan\nworkers: [A100]\nworkload: bert-squad\n", 1, ["link: ", "'.nan' is not a finite number", "inf"]),
        (
            "total_batch_size: yes\nworkers: [A100]\nworkload: bert-squad\n",
            1,
            ["'yes' is a truth value", "whole number from 1"],
        ),
        (
            "total_batch_size: -8\nworkers: [A100]\nworkload: bert-squad\n",
            1,
            ["'-8' is negative", "whole number from 1"],
        ),
        ("workers:\n  - {q: .inf, s: 0, k: 1, m: 0}\n", 2, ["workers[0].q", "not a finite number", "from 0"]),
        ("workers:\n  - {q: 1e300, s: 0, k: 1, m: 0}\n", 2, ["workers[0].q", "out of range", "from 0 to 1e+09"]),
        ("workers:\n  - {q: 1e-300, s: 0, k: 0, m: 0}\n", 2, ["workers[0]", "is 1e-300", "1e-15 seconds a sample"]),
        ("workers:\n  - 0 x A100\n", 2, ["'0' is out of range", "from 1"]),
        ("workers:\n  - -2 x A100\n", 2, ["'-2' is negative"]),
        ("workers:\n  -\n", 2, ["workers[0]", "is empty", "4 x A100"]),
        ("workers:\n  - [A100]\n", 2, ["workers[0]", "is a list", "4 x A100"]),
        ("workers:\n  - &x {q: 1, s: 0, k: 1, m: 0, <<: *x}\n", 2, ["'<<' merges another mapping"]),
        ("workers:\n  - {q: 1, s: 0, k: 1, m: 0, <<: 3}\n", 2, ["'<<' merges another mapping"]),
        ("workers: [A100]\n? [a, b]\n: 3\n", 2, ["a list or a mapping is no key", "Allowed are"]),
        (
            "workload: bert-squad\nworkers: [A100]\nprice:\n  A10: 3\n",
            4,
            ["'A10'", "Did you mean A100", "Allowed are *"],
        ),
        ("workload: bert-squad\nworkers: [A100]\nprice: {T4: 3}\n", 3, ["'T4'", "Allowed are *, A100"]),
        ("workload: bert-squad\nworkers: [A100]\nprice:\n  A100: 3\n  a100: 4\n", 4, ["has two prices"]),
        ("workload: bert-squad\nworkers: [A100]\nprice: [3]\n", 3, ["price: give one value here"]),
        ('workers:\n  - {q: 1, s: 0, k: 1, m: 0, name: "a\\nb"}\n', 2, ["control character", "a\\nb"]),
        ('name: "a\\eb"\nworkload: bert-squad\nworkers: [A100]\n', 1, ["name: ", "control character"]),
        ("workload: bert-squad\nworkers:\n  - {device: A100, name: ''}\n", 3, ["workers[0].name", "empty"]),
        ("jitter: 3\nworkload: bert-squad\nworkers: [A100]\n", 1, ["from 0 to 1, such as 0.03 for 3 %"]),
        ("link: {buckets: 1e9}\nworkload: bert-squad\nworkers: [A100]\n", 1, ["from 1 to 10000"]),
        ("total_batch_size: 2.5\nworkers: [A100]\nworkload: bert-squad\n", 1, ["whole number"]),
        ("model: params=124\nlink:\n  rate: 1Gbit\n  t_u: 1ms\nworkers: [{q: 1, s: 0, k: 1, m: 0}]\n", 3, ["t_o, t_u"]),
        ("model: size=124M\nworkers: [{q: 1, s: 0, k: 1, m: 0}]\n", 1, ["no model", "params=124M"]),
        ("- A100\n", 1, ["give a mapping here", "workers"]),
        ("link:\n  gamma: 1.5\nworkers: [{q: 1, s: 0, k: 1, m: 0}]\n", 2, ["link.gamma", "from 0 to 1"]),
        ("version: 2\nworkers: [{q: 1, s: 0, k: 1, m: 0}]\n", 1, ["version 2 is unknown", "reads 1"]),
        ("version: 1\nworkers:\n - {q: 1, s: 0, k: 1, m: 0}\nt_oo: 1\n", 4, ["'t_oo'", "Did you mean t_o"]),
    ],
)
def test_an_error_names_the_line_and_what_is_allowed(file, text, line, words):
    path = file(text)
    with pytest.raises(DocumentError) as error:
        read_cluster(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert all(word in message for word in words), message


def test_nothing_in_a_file_is_executed(file):
    with pytest.raises(DocumentError):
        read_cluster(file("workers: !!python/object/apply:os.system ['exit 1']\n"))


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("nothing.yaml", Given(), ["nothing.yaml: No such file"]),
        ("3xA10", Given(workload="bert-squad"), ["'A10' is unknown", "Did you mean A100"]),
        ("3xA100", Given(), ["depends on the model", "lightning-hetero profile"]),
        (",", Given(), ["names no worker"]),
        ("/", Given(), ["'/' is a folder", "YAML or JSON"]),
        ("no/cluster", Given(), ["'no/cluster' does not exist"]),
        ("A" * 400, Given(), ["is unknown"]),
        ("A" * 400 + ".yaml", Given(), ["File name too long"]),
    ],
)
def test_a_name_that_is_no_cluster_is_refused(text, given, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_cluster(text, given)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_workers_are_dropped_by_name():
    cluster = read_cluster("4XA100,2*T4", Given(workload="bert-squad"))
    assert [w.name for w in cluster.dropped(["2xa100", "T4"]).workers] == ["A100", "A100", "T4"]
    with pytest.raises(ValueError, match="no worker 'T40'.*Did you mean T4"):
        cluster.dropped(["T40"])
    with pytest.raises(ValueError, match="has only 2 workers 'T4'"):
        cluster.dropped(["3xT4"])
    with pytest.raises(ValueError, match="'0' is out of range"):
        cluster.dropped(["0xT4"])
    with pytest.raises(ValueError, match="leave one"):
        cluster.dropped(["4xA100", "2xT4"])
    small, large = Worker("a", 1, 0, 1, 0, memory=1), Worker("a", 1, 0, 1, 0, memory=2)
    assert Cluster((small, large)).dropped(["a"]).workers == (small,)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "100Mbit", 12.5e6),
        (parse_rate, "10 Gbit/s", 1.25e9),
        (parse_rate, "100Mbps", 12.5e6),
        (parse_rate, "3MB/s", 3e6),
        (parse_rate, "inf", math.inf),
        (parse_rate, ".inf", math.inf),
        (parse_count, "1_024", 1024),
        (parse_seconds, "1.5ms", 1.5e-3),
        (parse_seconds, "1e-3s", 1e-3),
        (parse_seconds, "2E+1 us", 2e-5),
        (parse_bytes, "2GB", 2e9),
        (parse_count, "1.3B", 1_300_000_000),
        (parse_count, "123.6M", 123_600_000),
        (parse_number, "1e-3", 1e-3),
        (parse_model, "params=124M", 496e6),
        (parse_model, "bytes = 3MB", 3e6),
    ],
)
def test_units(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *(
            (parse_rate, text)
            for text in (
                "1e-300Gbit",
                "1e300Gbit",
                "infGbit",
                "-inf",
                "true",
                "100",
                "100mbit",
                "-1Mbit",
                "0Mbit",
                "Mbit",
                "1e999Mbit",
                "1Mbit/h",
                "nan",
            )
        ),
        *((parse_seconds, text) for text in ("1", "1h", "ms", "-1ms", "1e300s", "inf")),
        *((parse_count, text) for text in ("0", "1.5", "-3", "1e300", "124m", "1e", "", True)),
        *((parse_number, text) for text in ("-1", "x", "nan", "inf", True, "1 2")),
        *((parse_model, text) for text in ("124M", "params", "params=", "parameters=124M")),
    ],
)
def test_units_are_strict(parse, text):
    with pytest.raises(ValueError, match=".*"):
        parse(text)


def test_prices():
    assert parse_prices(["A100=4.1", "RTX 4090=0.5", "2"]) == {"A100": 4.1, "RTX 4090": 0.5, "*": 2.0}
    for texts, words in (
        (["A100=much"], "--price A100=much: 'much' is not a number"),
        (["A100=-2"], "'-2' is negative; give a number from 0"),
        (["A100=2", "a100=3"], "a second price of a100"),
        (["2", "3"], "a second price of all"),
        (["=3"], "a price of no device"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_prices(texts)


@pytest.mark.parametrize(("link", "gamma"), [("{rate: 1Gbit}", 0.2), ("{rate: 1Gbit, gamma: 0.3}", 0.3)])
def test_gamma_is_that_of_the_profile_unless_the_link_gives_it(file, link, gamma):
    workers = (Worker("a", 1e-3, 0.0, 2e-3, 0.0),)
    file(json.dumps(record(Cluster(workers, Link(4e6, 1e8, gamma=0.2), 8))), "run.json")
    assert read_cluster(file(f"link: {link}\nworkers: [{{profile: run.json, count: 2}}]\n")).link.gamma == gamma
