"""Parts of ``lightning-hetero doctor`` with given facts: versions, devices, speeds, links, text, JSON and waits."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.cli.doctor import autoload as autoload_module
from lightning_hetero.cli.doctor import facts as facts_module
from lightning_hetero.cli.doctor import link as link_module
from lightning_hetero.cli.doctor import speed as speed_module
from lightning_hetero.cli.doctor.advice import advice
from lightning_hetero.cli.doctor.autoload import Autoload, autoload_of
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.document import SCHEMA, document, without_names
from lightning_hetero.cli.doctor.facts import device_facts, unmet
from lightning_hetero.cli.doctor.group import Ranks, RanksError
from lightning_hetero.cli.doctor.job import Job
from lightning_hetero.cli.doctor.link import LinkFacts, measure_pairs
from lightning_hetero.cli.doctor.speed import Speed, measure_speed, slowdown, timed_windows
from tests.cli.findings import autoload, process, speed
from tests.helpers import free_port

CPU = torch.device("cpu")


def test_requirements_that_are_not_met():
    requires = ["torch>=2.5", "accelerate>=1.10; extra == 'transformers'", "numba>=0.60; extra == 'numba'"]
    versions = {"torch": "2.13.0+cpu", "accelerate": "1.2", "numba": None}
    assert [text[:28] for text in unmet(versions, requires)] == ["accelerate 1.2 is installed,"]
    assert unmet({"torch": "2.14.0.dev20260901"}, requires) == [], "a nightly build is new enough"
    assert len(unmet(versions, [*requires, "accelerate>=1.10; extra == 'all'"])) == 1


def test_memory_of_a_cpu_is_that_of_its_cgroup(monkeypatch):
    monkeypatch.setattr(facts_module, "_host_memory", lambda: (64 * 10**9, 48 * 10**9))
    monkeypatch.setattr(facts_module, "memory_limit", lambda: 16 * 10**9)
    found = device_facts(CPU, 0)
    assert (found.memory, found.free) == (16 * 10**9, 16 * 10**9)
    monkeypatch.setattr(facts_module, "memory_limit", lambda: None)
    assert device_facts(CPU, 0).free == 48 * 10**9


@pytest.mark.parametrize(
    ("answer", "names", "error"),
    [
        ((0, 'noise\n{"called": true, "names": ["hetero_ddp"]}\n', ""), ("hetero_ddp",), ""),
        ((1, "", "Traceback\nImportError: gone\n"), (), "ImportError: gone"),
        ((1, '{"names": ["hetero_ddp"]}\n', "ImportError: gone\n"), (), "ImportError: gone"),
        ((0, "", ""), (), "exit code 0"),
        ((-9, "", ""), (), "exit code -9"),
        (subprocess.TimeoutExpired("python", 7), (), "it was not done within 7 s"),
    ],
)
def test_the_state_of_the_entry_point(answer, names, error, monkeypatch):
    def run(command, **given):
        assert given["timeout"] == 7
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    points = [
        SimpleNamespace(name="lightning_hetero", value="no_such_module:boot"),
        SimpleNamespace(name="other", value=""),
    ]
    monkeypatch.setattr(autoload_module.subprocess, "run", run)
    monkeypatch.setattr(autoload_module.metadata, "entry_points", lambda group: points)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "false")
    assert autoload_of(7) == Autoload(1, True, True, names, error)
    points[0].value = "json:dumps"
    assert not autoload_of(7).dangling
    del points[0]
    assert (autoload_of(7).entry_points, autoload_of(7).dangling) == (0, False)


class Device:
    """A clock, and runs that take given seconds, the last of them for ever."""

    def __init__(self, *seconds):
        self.now, self.seconds = 0.0, list(seconds)

    def __call__(self):
        return self.now

    def run(self):
        self.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def test_a_device_that_slows_down_is_told_from_noise(monkeypatch):
    device = Device(0.1, *[0.1] * 50, 0.125)
    assert slowdown(timed_windows(device.run, 15.0, device)) == pytest.approx(0.2, abs=0.01)
    rng = np.random.default_rng(0)
    noisy = [slowdown(rng.normal(1.0, 0.2, 15).tolist()) for _ in range(200)]
    assert sum(map(bool, noisy)) <= 2
    assert slowdown([1.0]) == 0.0
    rates = [*[4.0] * 5, *[3.0] * 5, *[2.0] * 4, 1.0]
    monkeypatch.setattr(speed_module, "timed_windows", lambda run, seconds: rates)
    monkeypatch.setattr(speed_module, "_product", lambda device, dtype, seconds: (1e9, None))
    assert measure_speed(CPU, 5.0, "float32") == Speed(2e9, tuple(1e9 * rate for rate in rates), 0.5)
    assert measure_speed(CPU, 0.5, "float32").slowdown is None
    assert measure_speed(CPU, 1.0, "float32").slowdown == 0.5
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1410)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 300_000)  # milliwatts
    assert (measure_speed(gpu, 5.0, "float32").clock, measure_speed(gpu, 5.0, "float32").power) == (1410.0, 300.0)
    assert measure_speed(CPU, 5.0, "float32").clock is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_are_real(precision):
    found = measure_speed(CPU, 0.02, precision)
    assert found.flops > 0
    assert len(found.rates) >= 3


class Pairs:
    """Times of round trips: a latency, and a rate that a second is cut by between clusters."""

    def __init__(self, size, latency=0.001, rate=1e6):
        self.size, self.latency, self.rate, self.asked = size, latency, rate, []

    def __call__(self, control, num_bytes=None):
        num_bytes = num_bytes or link_module.PING.num_bytes
        self.asked.append(num_bytes)
        seconds = np.full((self.size, self.size), 2 * (self.latency + num_bytes / self.rate))
        np.fill_diagonal(seconds, 0.0)
        return seconds


@pytest.mark.parametrize(("rate", "measurements"), [(1e6, 2), (1e9, 3)])
def test_latency_and_rate_of_each_pair(rate, measurements, monkeypatch):
    pairs = Pairs(3, rate=rate)
    monkeypatch.setattr(link_module, "link_seconds", pairs)
    latency, found, usual = measure_pairs(None)
    beside = ~np.eye(3, dtype=bool)
    assert latency[beside] == pytest.approx(0.001, rel=0.1)
    assert found[beside] == pytest.approx(rate, rel=0.1)
    assert not found[~beside].any()
    assert len(pairs.asked) == measurements
    assert usual[beside] == pytest.approx(0.001 + link_module.PING.num_bytes / rate), "times of the usual message"


LINK = LinkFacts("nccl", ((0.0, 1e-5), (1e-5, 0.0)), ((0.0, 1.2e10), (1.2e10, 0.0)), ((4096, 3e-5), (67108864, 0.01)))
FULL = Checkup(
    (
        process(
            0, versions={"lightning-hetero": "0.1.0", "torch": "2.13.0", "numba": None, "nccl": None, "cuda": "12.8"}
        ),
        process(1, "lab2"),
    ),
    2,
    speeds={0: replace(speed(5e13), clock=1410.0, power=300.0), 1: speed(2.5e13, 0.3)},
    autoload=autoload(names=("hetero_ddp", "hetero_elastic", "hetero_fsdp")),
    link=LINK,
    environment={"MASTER_ADDR": "lab1", "WORLD_SIZE": "2"},
    problems=("something is wrong",),
    failures=("rank 1: cannot reach 10.0.0.7:29500 from lab2.",),
)


def test_the_document_names_nobody():
    found = document(FULL)
    text = json.dumps(found)
    assert found["schema"] == SCHEMA == 1
    assert found["system"]
    assert (found["world_size"], found["precision"], found["seconds"]) == (2, "float32", 5.0)
    assert found["versions"]["torch"] == "2.13.0"
    assert "versions" not in found["ranks"][0]
    assert found["environment"] == {"MASTER_ADDR": "set", "WORLD_SIZE": "2"}
    assert [row["host"] for row in found["ranks"]] == ["host 0", "host 1"]
    assert found["ranks"][1]["speed"]["slowdown"] == 0.3
    assert found["autoload"]["works"]
    assert found["advice"] == without_names(advice(FULL), FULL.hosts)
    assert not [name for name in ("lab1", "lab2", "10.0.0.7", "identity") if name in text]
    named = json.dumps(document(FULL, hosts=True))
    assert all(name in named for name in ("lab1", "lab2", "10.0.0.7"))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("connect to [::ffff:10.1.2.3]:80", "connect to [ADDRESS]:80"),
        ("fe80::1ff:fe23:4567:890a%eth0", "ADDRESS%eth0"),
        ("No such file: '/home/me/run 1/x.py'", "No such file: 'FOLDER 1/x.py'"),
        (f"in {Path.home()}", "in FOLDER"),
        ("lab10 and lab1.net and lab1", "lab10 and host 0 and host 0"),
        ("2.13.0 at 12:30:00, 3/4 of 1.5 GB/s", "2.13.0 at 12:30:00, 3/4 of 1.5 GB/s"),
    ],
)
def test_names_addresses_and_folders_are_left_out(text, plain):
    assert without_names(text, ("lab1",)) == plain


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (0, "WORLD_SIZE=2, and rank 1 did not come within 0.3 s. Start as many processes"),
        (1, "found no way to the other 1"),
    ],
)
def test_ranks_that_do_not_come_are_named(rank, told):
    ranks = Ranks(Job(rank, 2), timeout=0.3)
    with pytest.raises(RanksError, match=told):
        ranks.join({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
