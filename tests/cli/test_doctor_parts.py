"""Parts of ``lightning-hetero doctor`` with given facts: places in a job, problems, speeds, advice, text and JSON."""

import json
import subprocess
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.cli.doctor import autoload as autoload_module
from lightning_hetero.cli.doctor import facts as facts_module
from lightning_hetero.cli.doctor import group as group_module
from lightning_hetero.cli.doctor import link as link_module
from lightning_hetero.cli.doctor import speed as speed_module
from lightning_hetero.cli.doctor.advice import advice, gain_over_even, link_advice, speed_advice
from lightning_hetero.cli.doctor.autoload import Autoload, autoload_of
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.document import SCHEMA, document, without_names
from lightning_hetero.cli.doctor.examine import devices_of
from lightning_hetero.cli.doctor.facts import DeviceFacts, ProcessFacts, device_facts, installed_versions, unmet
from lightning_hetero.cli.doctor.group import Failure, Ranks, RanksError
from lightning_hetero.cli.doctor.job import Job, group_problems, interface_problems, job_of
from lightning_hetero.cli.doctor.link import LinkFacts, measure_pairs, measure_sums
from lightning_hetero.cli.doctor.speed import Speed, measure_speed, slowdown, timed_windows
from lightning_hetero.cli.doctor.text import checkup_text
from tests.helpers import free_port

CPU = torch.device("cpu")
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def process(rank, host="lab1", kind="cuda", card=None, memory=24e9, **facts):
    """Facts of a rank; a GPU of its own unless a card is given."""
    identity = f"{host}/{rank if card is None else card}"
    given = {"cores": 8.0, "threads": 1, "host_memory": 64 * 10**9, "interfaces": ("lo", "eth0"), **facts}
    return ProcessFacts(rank, host, DeviceFacts(kind, "RTX 3090", identity, int(memory), int(memory) // 2), **given)


def speed(flops, lost=0.0):
    return Speed(flops, (flops,) * 15, lost)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, Job()),
        (TORCHRUN, Job(3, 4, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Job()),
        ({"WORLD_SIZE": "", "RANK": ""}, Job()),
    ],
)
def test_the_place_in_a_job(environment, job):
    assert job_of(environment) == job


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 is set, and RANK, MASTER_ADDR and MASTER_PORT are not: a script would wait",
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "WORLD_SIZE=4 is set, and MASTER_ADDR is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
        ({"RANK": "1"}, "RANK=1 is set, and WORLD_SIZE is not"),
    ],
)
def test_a_wrong_environment_is_said_and_the_process_checked_alone(environment, told):
    job = job_of(environment)
    assert job.alone
    assert told in job.problems[0]
    assert "torchrun" in job.problems[0]


def test_ranks_that_do_not_go_together():
    versions = {"torch": "2.13.0", "lightning": "2.6.6"}
    assert group_problems([process(0, versions=versions), process(1, versions=versions)]) == []
    shared = group_problems([process(0, card="a"), process(1, card="b"), process(2, card="a")])
    assert [text[:31] for text in shared] == ["ranks 0 and 2 share one GPU: NC"]
    (differ,) = group_problems([process(0, versions=versions), process(1, versions={**versions, "torch": "2.9"})])
    assert "torch differs between ranks (rank 0: 2.13.0, rank 1: 2.9)" in differ
    crowd = [process(rank, kind="cpu", cores=4.0, threads=4) for rank in range(2)]
    (crowded,) = group_problems(crowd)
    assert "ranks 0 and 1 run 8 threads on 4 cores" in crowded
    assert "OMP_NUM_THREADS=2" in crowded
    assert group_problems([crowd[0], replace(crowd[1], host="lab2")]) == []


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        (
            {"GLOO_SOCKET_IFNAME": "eth"},
            "GLOO_SOCKET_IFNAME=eth names no interface of rank 0's machine, which has lo, eth0",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth9,eth0"}, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth names no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth"}, "names no interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME=lo reaches no other machine"),
    ],
)
def test_interfaces_that_gloo_and_nccl_are_told_to_use(variables, fault):
    found = interface_problems([process(0), process(1, "lab2")], variables)
    assert [fault in text for text in found] == [True] * bool(fault)


def test_the_loopback_is_right_on_one_machine():
    assert interface_problems([process(0), process(1)], {"GLOO_SOCKET_IFNAME": "lo"}) == []


def test_versions_and_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(facts_module, "PACKAGES", ("torch", "no-such-package"))
    found = installed_versions()
    assert found["torch"] == facts_module.metadata.version("torch")
    assert found["no-such-package"] is None
    assert {"lightning-hetero", "python", "cuda"} <= set(found)


def test_requirements_that_are_not_met():
    requires = ["torch>=2.5", "accelerate>=1.10; extra == 'transformers'", "numba>=0.60; extra == 'numba'"]
    versions = {"torch": "2.13.0+cpu", "accelerate": "1.2", "numba": None}
    assert [text[:28] for text in unmet(versions, requires)] == ["accelerate 1.2 is installed,"]


def test_memory_of_a_cpu_is_that_of_its_cgroup(monkeypatch):
    monkeypatch.setattr(facts_module, "_host_memory", lambda: (64 * 10**9, 48 * 10**9))
    monkeypatch.setattr(facts_module, "memory_limit", lambda: 16 * 10**9)
    found = device_facts(CPU, 0)
    assert (found.memory, found.free) == (16 * 10**9, 16 * 10**9)
    monkeypatch.setattr(facts_module, "memory_limit", lambda: None)
    assert device_facts(CPU, 0).free == 48 * 10**9


def test_facts_of_a_gpu(monkeypatch):
    card = SimpleNamespace(name="H100", major=9, minor=0, uuid="77")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    found = device_facts(torch.device("cuda", 1), 1)
    assert (found.name, found.capability, found.free, found.memory) == ("H100", "9.0", 70, 80)
    assert found.identity.endswith("/77")


@pytest.mark.parametrize(("alone", "places"), [(True, ["cuda:0", "cuda:1"]), (False, ["cuda:1"])])
def test_a_process_of_its_own_has_all_gpus_and_a_rank_one(alone, places, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = devices_of(Job() if alone else Job(3, 4, 3))
    assert [str(device) for device in found] == places
    assert chosen == ([] if alone else found)


def autoload(**state):
    given = {"entry_points": 1, "dangling": False, "switched_off": False, "names": (), "error": "", **state}
    return Autoload(**given)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"names": ("hetero_ddp", "hetero_elastic", "hetero_fsdp")}, "needs no import: torch calls lightning-hetero"),
        ({"switched_off": True}, "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"),
        ({"entry_points": 0}, "on the path without being installed"),
        ({"dangling": True}, "leads to a folder where it no longer is"),
        ({"names": ("hetero_ddp",)}, "Lightning does not know its strategies"),
        ({"error": "RuntimeError: no"}, "a program that imports torch and Lightning fails: RuntimeError: no"),
    ],
)
def test_the_entry_point_in_words(state, told):
    assert told in autoload(**state).sentence()


@pytest.mark.parametrize(
    ("answer", "names", "error"),
    [
        ((0, 'noise\n{"called": true, "names": ["hetero_ddp"]}\n', ""), ("hetero_ddp",), ""),
        ((1, "", "Traceback\nImportError: gone\n"), (), "ImportError: gone"),
        ((-9, "", ""), (), "exit code -9"),
        (subprocess.TimeoutExpired("python", 7), (), "it was not done within 7 s"),
    ],
)
def test_the_state_of_the_entry_point(answer, names, error, monkeypatch):
    def run(command, **given):
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    points = [
        SimpleNamespace(name="lightning_hetero", value="no_such_module:boot"),
        SimpleNamespace(name="other", value=""),
    ]
    monkeypatch.setattr(autoload_module.subprocess, "run", run)
    monkeypatch.setattr(autoload_module.metadata, "entry_points", lambda group: points)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert autoload_of(7) == Autoload(1, True, True, names, error)


class Device:
    """A clock, and runs that take given seconds, the last of them for ever."""

    def __init__(self, *seconds):
        self.now, self.seconds = 0.0, list(seconds)

    def __call__(self):
        return self.now

    def run(self):
        self.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def test_speed_in_parts_without_the_warm_up():
    device = Device(100.0, 0.125)
    assert timed_windows(device.run, 7.5, device) == [8.0] * 15
    slow = Device(1.0, 4.0)
    assert timed_windows(slow.run, 0.1, slow) == [0.25] * 3


def test_a_device_that_slows_down_is_told_from_noise(monkeypatch):
    device = Device(0.1, *[0.1] * 50, 0.125)
    assert slowdown(timed_windows(device.run, 15.0, device)) == pytest.approx(0.2, abs=0.01)
    rng = np.random.default_rng(0)
    noisy = [slowdown(rng.normal(1.0, 0.2, 15).tolist()) for _ in range(200)]
    assert sum(map(bool, noisy)) <= 2
    assert slowdown([1.0]) == 0.0
    monkeypatch.setattr(speed_module, "timed_windows", lambda run, seconds: [4.0] * 5 + [3.0] * 5 + [2.0] * 5)
    monkeypatch.setattr(speed_module, "_product", lambda device, dtype, seconds: (1e9, None))
    assert measure_speed(CPU, 5.0, "float32") == Speed(2e9, (4e9,) * 5 + (3e9,) * 5 + (2e9,) * 5, 0.5)
    assert measure_speed(CPU, 0.5, "float32").slowdown is None


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
    latency, found, _ = measure_pairs(None)
    beside = ~np.eye(3, dtype=bool)
    assert latency[beside] == pytest.approx(0.001, rel=0.1)
    assert found[beside] == pytest.approx(rate, rel=0.1)
    assert not found[~beside].any()
    assert len(pairs.asked) == measurements


def test_larger_sums_are_left_out_where_they_take_long(monkeypatch):
    control = SimpleNamespace(gather=lambda mine: np.stack([mine, 2 * mine]))
    monkeypatch.setattr(link_module, "all_reduce_seconds", lambda size, device, group: size / 4e6)
    assert measure_sums(control, CPU) == [(size, size / 2e6) for size in (4096, 65536, 1048576)]
    link = LinkFacts("gloo", ((0.0,) * 4,) * 4, ((0.0,) * 4,) * 4, ((1000, 0.5), (9000, 3.0)))
    assert (link.bus_rate(1000, 0.5), link.averaging_rate) == (3000.0, 3000.0)
    assert LinkFacts("gloo").averaging_rate is None


def test_a_slow_rank_is_named_with_the_gain():
    found = speed_advice(Checkup((), 3, speeds={0: speed(2e12), 1: speed(2.1e12), 2: speed(1e12)}))
    assert found == [
        "rank 2 is 2.1 times slower than the fastest: with even batches the others wait. "
        'strategy="hetero_ddp" would give 1.7x, as far as computing limits the steps'
    ]
    assert gain_over_even([2.0, 2.1, 1.0]) == pytest.approx(5.1 / 3, rel=2e-3)
    assert "even batches are right" in speed_advice(Checkup((), 2, speeds={0: speed(1.0), 1: speed(1.02)}))[0]
    assert speed_advice(Checkup((), 1, speeds={0: speed(1.0)})) == []
    many = Checkup((), 1, speeds={0: speed(10.0), **{i: speed(1.0 + 0.1 * i) for i in range(1, 6)}})
    assert "device 1 is 9.09 times slower, device 2" in speed_advice(many)[0]
    assert "and 2 more are slower, too" in speed_advice(many)[0]


def test_the_link_in_words():
    fast, slow = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    link = LinkFacts("gloo", ((0.0,) * 4,) * 4, ((0.0,) * 4,) * 4, ((4096, 0.001), (50_000_000, 0.5)), fast)
    found = link_advice(Checkup((), 4, link=link))
    assert "averages 100 MB of gradients a second (50 MB in 500 ms): communication-bound from 100 MB per" in found[0]
    assert "100 MB (25 million parameters) take 1 s" in found[0]
    assert 'set compression="auto"' in found[0]
    assert found[1] == 'the link between the ranks 0, 1 | 2, 3 is slower than the links inside: hierarchy="auto"'
    assert len(link_advice(Checkup((), 4, link=replace(link, clusters=slow)))) == 1
    assert len(link_advice(Checkup((), 4, link=replace(link, clusters=((0,), (1,), (2,), (3,)))))) == 1
    assert link_advice(Checkup((), 4)) == []


@pytest.mark.parametrize(
    ("rows", "speeds", "told"),
    [
        ([process(0), process(1)], {0: speed(1.0, 0.23)}, "rank 0 lost 23.0% of its speed within 5 s"),
        ([process(0), process(1, memory=8e9)], {}, "rank 1 has less memory than others (8 of 24 GB): set probe_memory"),
        ([process(0, memory_limit=10**10)], {}, "a cgroup allows rank 0 10 of the machine's 64 GB"),
        ([process(0, cores=1.5, threads=4)], {}, "rank 0 may use 1.5 cores, and torch runs 4 threads"),
        ([process(0, cores=0.5, threads=1)], {}, "More cores would help"),
        ([process(0, kind="cpu", load=7.0)], {0: speed(1.0)}, "other programs used the machine of rank 0 (load 7 on 8"),
        ([process(0)], {}, ""),
    ],
)
def test_advice_on_one_thing_is_one_sentence(rows, speeds, told):
    found = advice(Checkup(tuple(rows), 2, speeds=speeds))
    assert [told in text for text in found] == [True] * bool(told)


LINK = LinkFacts("nccl", ((0.0, 1e-5), (1e-5, 0.0)), ((0.0, 1.2e10), (1.2e10, 0.0)), ((4096, 3e-5), (67108864, 0.01)))
FULL = Checkup(
    (
        process(0, versions={"lightning-hetero": "0.1.0", "torch": "2.13.0", "numba": None, "cuda": "12.8"}),
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


def test_the_text_has_a_row_per_rank_and_all_that_is_known():
    text = checkup_text(FULL)
    for line in (
        "versions    lightning-hetero 0.1.0, torch 2.13.0, CUDA 12.8",
        "without     numba",
        "processes   2 ranks on 2 machines",
        "rank  machine  device       free memory  cores  threads        float32, 5 s  of the fastest  over time",
        "0           0  RTX 3090  12 of 24 GB      8        1  50 TFLOP/s, 1410 MHz, 300 W  100.0%  steady",
        "1           1  RTX 3090  12 of 24 GB      8        1  25 TFLOP/s  50.0%  -30.0%",
        "pair: ranks 0 and 1, 12 GB/s, latency 10 us",
        "64 MiB  10 ms  6.71 GB/s",
        "- something is wrong.",
        "- rank 1: cannot reach 10.0.0.7:29500 from lab2.",
    ):
        assert " ".join(line.split()) in " ".join(text.split()), text
    assert "lab1" in checkup_text(FULL, hosts=True)
    assert max(map(len, checkup_text(FULL).splitlines())) < 120


def test_a_checkup_that_failed_early_can_be_written():
    assert "Failed\n- no way." in checkup_text(Checkup((), failures=("no way",)))
    assert document(Checkup((), failures=("no way",)))["failures"] == ["no way"]


def test_more_ranks_than_fit_are_counted():
    text = checkup_text(Checkup(tuple(process(rank) for rank in range(70)), 70))
    assert "... and 6 more (--json lists all)" in text


def test_the_document_names_nobody():
    found = document(FULL)
    text = json.dumps(found)
    assert found["schema"] == SCHEMA == 1
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
        ("lab10 and lab1.net and lab1", "lab10 and host 0 and host 0"),
        ("2.13.0 at 12:30:00, 3/4 of 1.5 GB/s", "2.13.0 at 12:30:00, 3/4 of 1.5 GB/s"),
    ],
)
def test_names_addresses_and_folders_are_left_out(text, plain):
    assert without_names(text, ("lab1",)) == plain


def test_a_failure_is_a_value_and_a_hang_ends_the_process(monkeypatch):
    ended, told = threading.Event(), []
    monkeypatch.setattr(group_module.os, "_exit", lambda code: ended.set())
    ranks = Ranks(Job(), timeout=0.01, on_hang=told.append)
    assert ranks.gather("speed", lambda: 1 / 0, 100.0) == [Failure("ZeroDivisionError: division by zero")]
    assert ranks.gather("speed", lambda: 7, 100.0) == [7]
    assert not told
    assert ranks.gather("speed", lambda: ended.wait(60)) == [True]
    assert told == ["rank 0 did not come back from 'speed' within 0.02 s."]


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
