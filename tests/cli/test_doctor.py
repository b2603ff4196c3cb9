"""``lightning-hetero doctor``: alone, in a job whose ranks fail or are lost, and what it makes of given findings."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero import cli
from lightning_hetero.cli.doctor import examine as module
from lightning_hetero.cli.doctor import group as group_module
from lightning_hetero.cli.doctor.autoload import NAMES, Autoload
from lightning_hetero.cli.doctor.facts import DeviceFacts, ProcessFacts
from lightning_hetero.cli.doctor.group import Failure
from lightning_hetero.cli.doctor.speed import Speed, slowdown
from tests.cli.ran import ran
from tests.ranks import at_end, free_port, run_ranks

WORKS = Autoload(1, False, False, NAMES)
PLACE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs it for an instant, without its second program: exit code, its document, and errors."""
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "autoload_of", lambda: WORKS)

    def _doctor(*options, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code, text, errors = ran(capsys, "doctor", "--seconds", "0.03", *options)
        return code, json.loads(text) if "--json" in options and text else text, errors

    return _doctor


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_alone(doctor, precision):
    code, found, _ = doctor("--json", "--precision", precision)
    (row,) = found["ranks"]
    assert code == 0
    assert (found["world_size"], found["precision"], found["failures"]) == (1, precision, [])
    assert row["speed"]["flops"] > 0
    assert row["device"]["memory"] >= row["device"]["free"] > 0
    assert any("torchrun" in text for text in found["advice"])
    assert os.uname().nodename not in re.findall(r"[\w.-]+", json.dumps(found))
    code, text, _ = doctor("--precision", precision)
    assert code == 0
    assert re.search(r"^0 .* [\d.]+ [GT]FLOP/s ", text, re.M)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "", "RANK": ""}, None),
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "4", "RANK": "3", "MASTER_PORT": "1", "MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"GLOO_SOCKET_IFNAME": "eth99"}, "eth99"),
    ],
)
def test_a_wrong_environment_is_said_and_the_process_checked_alone(doctor, environment, told):
    code, found, _ = doctor("--json", **environment)
    assert (code, len(found["ranks"])) == (0, 1)
    assert any(told in text for text in found["problems"]) if told else not found["problems"]


def test_a_device_that_slows_down_is_told_from_noise():
    rng = np.random.default_rng(0)
    assert slowdown([*[10.0] * 7, *[8.0] * 8]) == pytest.approx(0.2, abs=0.05)
    assert sum(bool(slowdown(rng.normal(1.0, 0.2, 15).tolist())) for _ in range(200)) <= 2
    assert slowdown([1.0]) == 0.0


# with other ranks


def _checked(rank, fault):
    """Exit code and output of a rank, of which the second may have a fault in the measurement of speed."""
    patch = pytest.MonkeyPatch()
    at_end(patch.undo)
    patch.setattr(module, "autoload_of", lambda: WORKS)
    if rank == 1 and fault != "none":
        patch.setattr(module, "measure_speed", lambda *given: 1 / 0 if fault == "raise" else sys.exit("gone"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main(["doctor", "--seconds", "0.03", "--timeout", "3" if fault == "lost" else "60", "--json"])
        except SystemExit as ended:
            code = ended.code
    return code, output.getvalue()


@pytest.mark.parametrize(("fault", "told"), [("none", None), ("raise", "ZeroDivisionError"), ("lost", "'speed'")])
def test_ranks_together_whatever_one_of_them_does(fault, told):
    (code, text), (_, silent) = run_ranks(_checked, 2, fault)
    found = json.loads(text)
    assert (code, silent) == (int(fault != "none"), "")
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert [("rank 1" in text, told in text) for text in found["failures"]] == [(True, True)] * (fault != "none")
    if fault != "lost":
        assert [bool(row["speed"]) for row in found["ranks"]] == [True, fault == "none"]
        assert found["link"]["rate"][0][1] > 0
        assert [size for size, _ in found["link"]["sums"]][:2] == [4096, 65536]


def test_ranks_that_find_no_other_one_say_so_and_the_first_is_checked(doctor):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, found, _ = doctor("--timeout", "0.3", "--json", RANK="0", **place)
    assert code == 1
    assert "rank 1" in found["failures"][0]
    assert found["ranks"][0]["speed"]["flops"] > 0
    code, text, errors = doctor("--timeout", "0.1", RANK="1")
    assert (code, text, "rank 1" in errors) == (1, "", True)
    code, _, _ = doctor("--timeout", "0.1", TORCHELASTIC_RUN_ID="1")
    assert code == 0, "torchrun would end the first rank, which has more to say"


@pytest.mark.slow("torchrun starts interpreters; the same ranks are tested together above")
def test_under_torchrun():
    """The real thing, with the second program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += ["-m", "lightning_hetero", "doctor", "--seconds", "0.05", "--timeout", "120"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "FLOP/s" in line] == ["0", "1"], "one table"
    assert 'strategy="hetero_ddp" needs no import' in done.stdout


# what is made of given findings

TIMES = np.array([[0.0, 1e-5], [1e-5, 0.0]])
SUMS = ((4096, 0.001),)


def process(rank, host="lab1", kind="cuda", card=None, **facts):
    """Facts of a rank; a GPU of its own unless a card is given."""
    identity = f"{host}/{rank if card is None else card}"
    given = {"cores": 8.0, "threads": 1, "host_memory": 64 * 10**9, "interfaces": ("lo", "eth0"), **facts}
    return ProcessFacts(rank, host, DeviceFacts(kind, "RTX 3090", identity, 24 * 10**9, 12 * 10**9), **given)


def speed(flops, lost=0.0):
    return Speed(flops, (flops,) * 15, lost)


def options_of(**changed):
    return SimpleNamespace(
        **{"seconds": 20.0, "precision": "float32", "timeout": 7.0, "json": True, "hosts": False, **changed}
    )


class Others:
    """Ranks of which this process is the first; the others have given answers."""

    control = None

    def __init__(self, answers):
        self.answers = answers

    def join(self, environment):
        assert environment is not None

    def gather(self, what, measure, seconds=0.0):
        return [measure(), *self.answers[what]]


@pytest.fixture
def examined(monkeypatch, capsys):
    """Document of a job whose ranks are pretended; ``own`` has the facts of the first one, and the others' answers."""

    def _examined(*others, own=None, speeds=(1e12, 5e11), hosts=False, document=True, **answers):
        world = max(len(others) + 1, 2)
        others = others or (process(1),)
        job = {"WORLD_SIZE": str(world), "RANK": "0", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1"}
        patched = {
            "process_facts": lambda rank, device, local_rank: process(rank, **(own or {})),
            "measure_speed": lambda *given: speed(speeds[0]),
            "autoload_of": lambda: WORKS,
            "measure_pairs": lambda control: (TIMES, 1e14 * TIMES, 2 * TIMES),
            "measure_sums": lambda control, device, group: SUMS,
            "new_group": lambda backend: None,
        }
        for name, value in patched.items():
            monkeypatch.setattr(module, name, value)
        examination = module.Examination(options_of(hosts=hosts, json=document), job)
        usual = {"facts": [[one] for one in others], "autoload": [None], "speed": [speed(v) for v in speeds[1:]]}
        usual |= {"pairs": [patched["measure_pairs"](None)] * (world - 1), "all-reduces": [SUMS]}
        examination.ranks = Others(usual | answers)
        examination.go()
        examination.write()
        written = capsys.readouterr().out
        return json.loads(written) if document else written

    return _examined


def test_the_first_rank_writes_what_all_have_measured(examined, monkeypatch):
    monkeypatch.setattr(module.metadata, "requires", lambda name: ["torch>=99", "numba>=99; extra == 'numba'"])
    versions = {"torch": "2.13.0", "numba": "1.0", "numpy": "2.0"}
    found = examined(process(1, versions={**versions, "torch": "2.9"}), own={"versions": versions})
    assert [(row["rank"], row["speed"]["flops"]) for row in found["ranks"]] == [(0, 1e12), (1, 5e11)]
    assert found["link"]["latency"] == [[0.0, 1e-5], [1e-5, 0.0]]
    assert found["link"]["sums"] == [[4096, 0.001]]
    assert (found["world_size"], found["seconds"], found["failures"]) == (2, 20.0, [])
    for word in ("torch differs", "torch 2.13.0 is installed", "numba 1.0 is installed"):
        assert any(word in text for text in found["problems"]), word
    assert not any("numpy" in text for text in found["problems"])


def test_the_text_says_what_the_document_does(examined):
    versions = {"torch": "2.13.0", "cuda": "12.8"}
    text = examined(process(1, "lab2"), own={"versions": versions}, hosts=True, document=False)
    words = ("torch 2.13.0", "CUDA 12.8", "RTX 3090", "lab2", "500 GFLOP/s", "50.0%", "1 GB/s", "4 KiB", "Problems")
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("versions", "known"),
    [
        ({"lightning": "2.6.3", "torch": "2.5.1+cu121"}, {"GHSA-w37p-236h-pfx3", "CVE-2025-32434"}),
        ({"lightning": "2.6.6", "torch": "2.13.0"}, set()),
    ],
)
def test_versions_with_published_vulnerabilities_are_problems(examined, versions, known):
    problems = " ".join(examined(own={"versions": versions})["problems"])
    assert known <= set(re.findall(r"CVE-[\d-]+|GHSA(?:-\w{4}){3}", problems))
    assert bool(known) == ("CVE" in problems)


@pytest.mark.parametrize(
    ("second", "available", "backend"),
    [({}, True, "nccl"), ({"card": "0"}, True, "gloo"), ({"kind": "cpu"}, True, "gloo"), ({}, False, "gloo")],
    ids=["a GPU each", "one GPU", "a GPU and a CPU", "no NCCL"],
)
def test_gradients_go_by_nccl_where_each_rank_has_a_gpu(examined, monkeypatch, second, available, backend):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: available)
    assert examined(process(1, **second))["link"]["backend"] == backend


def test_checks_that_fail_are_all_said_and_the_rest_is_kept(examined):
    failures = {name: [Failure(f"no {name}")] for name in ("facts", "speed", "pairs")}
    found = examined(**failures)
    for name, text in zip(failures, found["failures"], strict=True):
        assert "rank 1" in text
        assert f"no {name}" in text
    assert found["ranks"][0]["speed"]["flops"] == 1e12
    assert found["link"] is None


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("GLOO", "eth0", None),
        ("GLOO", "eth", "eth"),
        ("GLOO", "^lo", "^lo"),
        ("GLOO", "lo", "reaches no other machine"),
        ("NCCL", "^lo,eth", "^lo,eth"),
    ],
)
def test_interfaces_that_gloo_and_nccl_are_told_to_use(examined, variable, value, wrong):
    sockets = {f"{variable}_SOCKET_IFNAME": value}
    problems = examined(process(1, "lab2", sockets=sockets), own={"sockets": sockets})["problems"]
    assert [f"{variable}_SOCKET_IFNAME" in text and wrong in text for text in problems] == [True] * bool(wrong)


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ((2e12, 2.1e12, 1e12), [2]),
        ((1.2, *[1.0] * 9), []),
        ((10.0, 1.5, 1.4, 1.3, 2.0, 3.0), [3, 2, 1]),
    ],
)
def test_uneven_batches_are_advised_where_they_gain_with_the_slowest_ranks(examined, speeds, slow):
    found = examined(*[process(i) for i in range(1, len(speeds))], speeds=speeds)
    (advised,) = [text for text in found["advice"] if "hetero_ddp" in text]
    assert [int(rank) for rank in re.findall(r"rank (\d+) is", advised)] == slow
    assert not slow or f" {np.mean(speeds) / min(speeds):.3g}x" in advised


def test_the_document_names_nobody_unless_it_is_asked_to(examined):
    text = "'/home/me/run 1/x.py' of lab2 to [::ffff:10.1.2.3]:80, at 12:30, 3/4 of 1.5 GB/s"
    found = examined(process(1, "lab2"), speed=[Failure(text)])
    assert [row["host"] for row in found["ranks"]] == ["host 0", "host 1"]
    assert "'FOLDER 1/x.py' of host 1 to [ADDRESS]:80, at 12:30, 3/4 of 1.5 GB/s" in found["failures"][0]
    assert [name for name in ("lab1", "lab2", "10.0.0.7", "identity") if name in json.dumps(found)] == []
    named = json.dumps(examined(process(1, "lab2"), hosts=True, speed=[Failure(text)]))
    assert all(name in named for name in ("lab1", "lab2", "10.0.0.7", text))


def test_a_device_that_hangs_ends_the_process_after_what_was_found(monkeypatch, capsys):
    ended, codes = threading.Event(), []
    monkeypatch.setattr(group_module.os, "_exit", lambda code: codes.append(code) or ended.set())
    examination = module.Examination(options_of(timeout=0.01), {})
    examination.ranks.gather("speed of cpu", lambda: ended.wait(60))
    assert codes == [1]
    assert "speed of cpu" in json.loads(capsys.readouterr().out)["failures"][0]
