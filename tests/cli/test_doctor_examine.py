"""Course of ``lightning-hetero doctor`` in one process: a job whose other ranks are given, and ends before its time."""

import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.cli.doctor import examine as module
from lightning_hetero.cli.doctor import group as group_module
from lightning_hetero.cli.doctor.autoload import LONGEST_S, NAMES, Autoload
from lightning_hetero.cli.doctor.group import Failure
from tests.cli.findings import process, speed
from tests.cli.ran import ran
from tests.helpers import free_port

OPTIONS = SimpleNamespace(seconds=20.0, precision="bfloat16", timeout=7.0, json=True, hosts=False)
JOB = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
LATENCY, RATE = np.array([[0.0, 1e-5], [1e-5, 0.0]]), np.array([[0.0, 1e9], [1e9, 0.0]])
SUMS = ((4096, 0.001),)


class Others:
    """Ranks of which this process is one; the others have given answers."""

    control = None

    def __init__(self, rank, **answers):
        self.rank, self.answers, self.seconds = rank, answers, {}

    def join(self, environment):
        assert environment is not None

    def gather(self, what, measure, seconds=0.0):
        self.seconds[what] = seconds
        found = [measure(), self.answers.get(what.replace("-", "_"))]
        return found if self.rank == 0 else found[::-1]


@pytest.fixture
def given(monkeypatch):
    """Facts, speeds and links that are not measured; records what is asked for."""
    asked = []

    def facts(rank, device, local_rank):
        asked.append(("facts", rank, str(device), local_rank))
        return process(rank, versions={"torch": "2.13.0"}, interfaces=("lo",), sockets={"GLOO_SOCKET_IFNAME": "eth7"})

    def timed(device, seconds, precision):
        asked.append(("speed", str(device), seconds, precision))
        return speed(1e12)

    monkeypatch.setattr(module, "process_facts", facts)
    monkeypatch.setattr(module, "measure_speed", timed)
    monkeypatch.setattr(module, "autoload_of", lambda: Autoload(1, False, False, NAMES))
    monkeypatch.setattr(module, "measure_pairs", lambda control: (LATENCY, RATE, 2 * LATENCY))
    monkeypatch.setattr(module, "measure_sums", lambda control, device, group: SUMS)
    monkeypatch.setattr(module, "clusters_by_time", lambda usual: ((0,), (1,)) if usual[0, 1] == 2e-5 else ())
    monkeypatch.setattr(module.metadata, "requires", lambda name: ["torch>=99"])
    monkeypatch.setattr(module, "new_group", lambda backend: f"a group of {backend}")
    return asked


def examined(rank=0, second=None, **answers):
    """Examination of a job of two ranks; what the second one answers to each check."""
    examination = module.Examination(OPTIONS, {**JOB, "RANK": str(rank)})
    other = process(1 - rank, **(second or {"versions": {"torch": "2.9"}}))
    usual = {"facts": [other], "autoload": None, "speed": speed(5e11), "pairs": (LATENCY, RATE, 2 * LATENCY)}
    examination.ranks = Others(rank, **usual | answers)
    examination.go()
    return examination


def test_a_rank_measures_its_device_and_the_first_one_writes(given):
    examination = examined()
    found = examination.checkup
    assert given == [("facts", 0, "cpu", 3), ("speed", "cpu", 20.0, "bfloat16")]
    assert examination.speaks
    assert [row.rank for row in found.rows] == [0, 1]
    assert {rank: value.flops for rank, value in found.speeds.items()} == {0: 1e12, 1: 5e11}
    assert (found.link.latency, found.link.rate) == (((0.0, 1e-5), (1e-5, 0.0)), ((0.0, 1e9), (1e9, 0.0)))
    assert (found.link.sums, found.link.clusters) == (SUMS, ((0,), (1,)))
    told = [text[:35] for text in found.problems]
    assert told == [
        "torch differs between ranks (rank 0",
        "torch 2.9 may run code from a file ",
        "torch 2.13.0 is installed, and ligh",
        "GLOO_SOCKET_IFNAME=eth7: eth7 is no",
    ]
    assert not found.failures
    assert examination.ranks.seconds["speed"] >= OPTIONS.seconds
    assert examination.ranks.seconds["autoload"] >= LONGEST_S


@pytest.mark.parametrize(
    ("second", "available", "backend"),
    [({}, True, "nccl"), ({"card": "0"}, True, "gloo"), ({"kind": "cpu"}, True, "gloo"), ({}, False, "gloo")],
    ids=["a GPU each", "one GPU", "a GPU and a CPU", "no NCCL"],
)
def test_gradients_go_by_nccl_where_each_rank_has_a_gpu(given, monkeypatch, second, available, backend):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: available)
    monkeypatch.setattr(module, "measure_sums", lambda control, device, group: given.append(group) or SUMS)
    assert examined(second=second or {"versions": {}}).checkup.link.backend == backend
    assert given[-1] == ("a group of nccl" if backend == "nccl" else None)


def test_checks_that_fail_are_all_said_and_the_rest_is_kept(given):
    found = examined(facts=Failure("no facts"), speed=Failure("no speed"), pairs=Failure("no way")).checkup
    assert found.failures == ("rank 1: facts: no facts.", "rank 1: no speed: no speed.", "rank 1: pairs: no way.")
    assert list(found.speeds) == [0]
    assert found.link is None
    found = examined(all_reduces=Failure("no sum")).checkup
    assert found.failures == ("rank 1: all-reduces: no sum.",)
    assert found.link.sums == SUMS


@pytest.fixture
def doctor(given, monkeypatch, capsys):
    """Runs it with what is given: exit code, output and errors."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def _doctor(*options, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return ran(capsys, "doctor", *options)

    return _doctor


def test_a_rank_that_finds_no_other_one_says_so_and_leaves_the_word_to_the_first(doctor):
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, text, errors = doctor("--timeout", "0.1", **place)
    assert (code, text) == (1, "")
    assert errors.startswith(
        "lightning-hetero doctor: rank 1: this process found no way to the other 1 of WORLD_SIZE=2"
    )
    code, text, errors = doctor("--timeout", "0.1", TORCHELASTIC_RUN_ID="1")
    assert code == 0, "torchrun would end the first rank, which has more to say"
    assert "found no way" in errors


def test_a_launcher_that_ends_the_process_does_not_lose_what_was_found(doctor, monkeypatch):
    def end(code):
        raise SystemExit(code)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module.os, "_exit", end)
    monkeypatch.setattr(module, "measure_speed", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    code, text, _ = doctor()
    assert code == 1
    assert "RTX 3090" in text
    assert "Failed\n- the launcher ended this process, as it does when another rank fails" in text
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_device_that_hangs_ends_the_process_after_what_was_found(doctor, monkeypatch):
    ended, codes = threading.Event(), []
    monkeypatch.setattr(group_module.os, "_exit", lambda code: codes.append(code) or ended.set())
    monkeypatch.setattr(module, "measure_speed", lambda *given: ended.wait(60) and speed(1.0))
    _, text, _ = doctor("--timeout", "0.05", "--seconds", "0.01")
    assert codes == [1]
    first = text.partition("versions ")[2].partition("versions ")[0]
    assert "RTX 3090" in first
    assert "Failed\n- rank 0 did not come back from 'speed of cpu' within 0.16 s." in first
