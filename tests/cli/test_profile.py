"""``lightning-hetero profile`` and ``profile-convergence``: what they tell a script and make of its answers."""

import json
import sys
from functools import partial

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.probe_job import VARIABLE, DeviceReport, ProbeOrder
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback, Given, plan_cluster, read_cluster
from tests.cli.ran import ran
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

# In place of a training: answers an order as the strategy does, with times and a loss that are known.
FAKE = """
import json, os, subprocess, sys, time
order = json.loads(os.environ["LIGHTNING_HETERO_PROBE"])
here = os.path.dirname(__file__)
with open(os.path.join(here, "orders"), "a") as file:
    known = {"seed": os.environ.get("PL_GLOBAL_SEED"), "launched": os.environ.get("LAUNCHED")}
    file.write(json.dumps({**order, **known, "arguments": sys.argv[1:]}) + "\\n")
number = sum(1 for _ in open(os.path.join(here, "orders")))
FIRST
answer = {"dataset": 800, "total": order["total"] or 32}
if not order["steps"]:
    trained = order["samples"] > 0
    loss = 0.5 * (1 + order["rate"] * order["staleness"] + (order["total"] or 0) / 1000) if trained else None
    answer |= {"loss": loss, "samples": order["samples"], "staleness": order["staleness"], "world_size": 2,
               "min_local": 1}
else:
    rows = [[b, 0.001 * b + 0.01, 0.002 * b + 0.02, 0.2 * (0.002 * b + 0.02)] for b in order["sizes"] or (8, 16)] * 3
    answer |= {"name": "gpu", "rows": ROWS or rows, "memory": 48, "parameters": 1000, "gradient_bytes": 4000}
json.dump(answer, open(order["report"], "w"))
"""


@pytest.fixture
def started(tmp_path, monkeypatch, capsys):
    """Starts a command for a script: exit code, what was written, errors."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def _started(command, *options, first="", rows="[]", arguments=()):
        script = tmp_path / "script.py"
        script.write_text(FAKE.replace("FIRST", first).replace("ROWS", rows))
        (tmp_path / "orders").unlink(missing_ok=True)
        output = ("--output", str(tmp_path / f"{command}.json"))
        return ran(capsys, command, *output, *options, str(script), *arguments)

    return _started


@pytest.fixture
def profile(started):
    return partial(started, "profile")


@pytest.fixture
def converge(started):
    return partial(started, "profile-convergence")


def orders_of(folder):
    return [json.loads(line) for line in (folder / "orders").read_text().splitlines()]


LAUNCHER = ("--launcher", f"env LAUNCHED=twice {sys.executable}")


def test_a_profile_is_a_device_of_a_plan(profile, tmp_path):
    options = ("--steps", "5", "--price", "2", "--name", "mine", *LAUNCHER)
    code, text, _ = profile(*options, arguments=["--lr", "3"])
    (order,) = orders_of(tmp_path)
    assert (code, "mine" in text) == (0, True)
    assert (order["steps"], order["sizes"], order["arguments"]) == (5, [], ["--lr", "3"])
    assert order["launched"] == "twice"
    cluster = read_cluster(f"4x{tmp_path / 'profile.json'}", Given(total_batch_size=64, rate=1e6))
    for worker in cluster.workers:
        assert (worker.name, worker.memory, worker.price) == ("mine", 48, 2.0)
        assert (worker.q, worker.s, worker.k, worker.m) == pytest.approx((0.001, 0.01, 0.002, 0.02), rel=1e-4)
    assert (cluster.samples, cluster.link.gradient_bytes, cluster.link.gamma) == (800, 4000, pytest.approx(0.2))
    assert plan_cluster(cluster).local_batch_sizes == (16, 16, 16, 16)
    assert profile("--sizes", "4,8,12")[0] == 0
    assert orders_of(tmp_path)[0]["sizes"] == [4, 8, 12]


def test_jitter_and_error_are_those_of_the_rows(profile, tmp_path):
    rng, rows = np.random.default_rng(0), []
    for size in (8, 16, 32, 48, 64) * 36:
        forward, backward = (1 + 0.03 * rng.standard_normal(2)) * [0.001 * size + 0.01, 0.002 * size + 0.02]
        rows.append([size, forward, backward, 0.1 * backward])
    assert profile(rows=json.dumps(rows))[0] == 0
    (worker,) = read_cluster(str(tmp_path / "profile.json")).workers
    assert worker.jitter == pytest.approx(0.03, rel=0.15)
    assert 0 < worker.error < 0.01
    assert worker.seconds(64) == pytest.approx(0.003 * 64 + 0.03, rel=0.02)


def _timed(rank, world, memory):
    device = EmulatedDeviceCallback(DeviceProfile(q=0.0001, s=0.001, k=0.0002, m=0.001, memory=memory))
    trainer = trainer_of("hetero_ddp", world, callbacks=[device], max_epochs=1)
    try:
        trainer.fit(Regressor(), DataLoader(Points(256), 16, shuffle=True))
    except SystemExit as ended:
        return ended.code
    except Exception as error:  # noqa: BLE001
        return str(error)


@pytest.mark.parametrize(
    ("sizes", "memory", "timed", "bound"),
    [((), None, {4, 8, 16, 24, 32}, None), ((4, 8, 16, 64), 20, {4, 8, 16}, 16)],
    ids=["around the script's own", "a size that does not fit"],
)
def test_a_training_times_its_worker_as_it_is_ordered(tmp_path, sizes, memory, timed, bound):
    order = ProbeOrder(str(tmp_path / "answer.json"), steps=4, sizes=sizes)
    ended = run_ranks(_timed, 1, 1, memory, env={VARIABLE: order.announce()}, start="fork")  # it leaves its handlers
    assert ended == [0]
    report = DeviceReport.read(order.report)
    assert {row[0] for row in report.rows} == timed
    assert (report.memory, report.total, report.dataset) == (bound, 16, 256)
    assert all(row[1] + row[2] >= 0.0003 * row[0] + 0.002 for row in report.rows)


@pytest.mark.parametrize(("sizes", "world", "word"), [((), 2, "2 workers"), ((500, 600), 1, "1 to 128")])
def test_a_training_that_cannot_be_timed_says_why(tmp_path, sizes, world, word):
    order = ProbeOrder(str(tmp_path / "answer.json"), steps=4, sizes=sizes)
    assert all(word in str(why) for why in run_ranks(_timed, world, world, None, env={VARIABLE: order.announce()}))
    assert word in ProbeOrder.refusal(order.report)


@pytest.mark.parametrize(
    ("command", "options", "word"),
    [
        ("profile", ("--name", "a\nb"), "control character"),
        ("profile", ("--launcher", "'"), "--launcher"),
        ("profile-convergence", ("--probes", "0"), "--probes"),
        ("profile-convergence", ("no-script.py",), "no-script.py"),
        ("profile-convergence", ("--output", "/nowhere/profile.json"), "/nowhere"),
    ],
)
def test_options_that_make_no_sense_are_named_before_anything_starts(started, tmp_path, command, options, word):
    code, _, errors = started(command, *options)
    assert (code, word in errors) == (2, True), errors
    assert not (tmp_path / "orders").exists()


# convergence


def test_probes_are_those_of_the_search_and_their_answers_are_the_profile(converge, tmp_path):
    code, _, errors = converge("--probes", "5", "--seed", "7", *LAUNCHER, arguments=["--lr", "3"])
    assert code == 0, errors
    described, baseline, *probes = orders_of(tmp_path)
    assert (described["samples"], described["total"]) == (0, None)
    assert (baseline["samples"], baseline["total"], baseline["rate"], baseline["staleness"]) == (400, 29, 0.0, 0)
    assert [order["staleness"] for order in probes] == [1] * 5
    for order in (described, baseline, *probes):
        assert (order["arguments"], order["seed"], order["launched"]) == (["--lr", "3"], "7", "twice")
    found = ConvergenceProfile.load(tmp_path / "profile-convergence.json")
    assert (found.min_total, found.max_total, found.baseline) == (8, 50, pytest.approx(0.5 * 1.029))
    for (rate, total, extra), order in zip(found.points, probes, strict=True):
        assert (rate, total) == (order["rate"], order["total"])
        assert extra == pytest.approx((1 + rate + total / 1000) / 1.029 - 1)
    assert not (tmp_path / "profile-convergence.json.partial").exists()


def test_a_script_whose_trainer_has_another_strategy_gives_no_answer(profile):
    code, _, errors = profile(first="sys.exit(0)")
    assert (code, "strategy='hetero_ddp'" in errors) == (1, True)


@pytest.mark.parametrize("command", ["profile", "profile-convergence"])
def test_a_script_that_fails_is_shown_and_what_was_answered_is_kept(started, tmp_path, command):
    number = 1 if command == "profile" else 4
    failing = f"if number == {number}:\n    print('out of memory', file=sys.stderr)\n    sys.exit(3)"
    code, _, errors = started(command, *(["--probes", "3"] if number == 4 else []), first=failing)
    assert code == 1
    assert "exit code 3" in errors
    assert "out of memory\n" in errors
    assert not (tmp_path / f"{command}.json").exists()
    if number == 4:
        assert "profile-convergence.json.partial" in errors
        assert len(ConvergenceProfile.load(tmp_path / "profile-convergence.json.partial").points) == 1


@pytest.mark.slow("waits for a second until a script is ended")
def test_a_probe_that_hangs_is_ended_with_its_workers(converge, tmp_path):
    hanging = (
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(os.path.join(here, 'worker'), 'w').write(str(worker.pid))\n"
        "time.sleep(600)"
    )
    code, _, errors = converge("--timeout", "1", first=hanging)
    assert (code, "--timeout" in errors) == (1, True)
    assert not psutil.pid_exists(int((tmp_path / "worker").read_text()))
