"""Parts of ``lightning-hetero doctor`` with given facts: versions, devices, speeds, links, text, JSON and waits."""

import json
import os
import re
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.cli.doctor import autoload as autoload_module
from lightning_hetero.cli.doctor import facts as facts_module
from lightning_hetero.cli.doctor import group as group_module
from lightning_hetero.cli.doctor import link as link_module
from lightning_hetero.cli.doctor import speed as speed_module
from lightning_hetero.cli.doctor.advice import advice
from lightning_hetero.cli.doctor.autoload import Autoload, autoload_of
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.document import SCHEMA, document, without_names
from lightning_hetero.cli.doctor.examine import devices_of
from lightning_hetero.cli.doctor.facts import device_facts, installed_versions, process_facts, unmet
from lightning_hetero.cli.doctor.group import Failure, Ranks, RanksError
from lightning_hetero.cli.doctor.job import Job
from lightning_hetero.cli.doctor.link import LinkFacts, measure_pairs, measure_sums
from lightning_hetero.cli.doctor.speed import Speed, measure_speed, slowdown, timed_windows
from lightning_hetero.cli.doctor.text import checkup_text
from tests.cli.findings import autoload, process, speed
from tests.helpers import free_port

CPU = torch.device("cpu")


def test_versions_and_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(facts_module, "PACKAGES", ("torch", "no-such-package"))
    found = installed_versions()
    assert found["torch"] == facts_module.metadata.version("torch")
    assert found["no-such-package"] is None
    assert {"lightning-hetero", "python", "cuda"} <= set(found)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert installed_versions()["cuda"] == "12.8"
    for version, shown in (("6.4", "HIP 6.4"), (None, None)):
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", version)
        assert installed_versions()["cuda"] == shown


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


def test_memory_is_what_the_system_says(monkeypatch):
    lines = {"MemTotal": "64 kB", "MemFree": "1 kB", "MemAvailable": "48 kB"}
    monkeypatch.setattr(facts_module, "_table", lambda path: lines)
    monkeypatch.setattr(facts_module, "memory_limit", lambda: None)
    found = device_facts(CPU, 0)
    assert (found.memory, found.free) == (65536, 49152)


def test_facts_of_a_process(monkeypatch):
    monkeypatch.setattr(facts_module, "_host_memory", lambda: (64, 48))
    monkeypatch.setattr(facts_module, "memory_limit", lambda: 32)
    monkeypatch.setattr(facts_module, "cpu_share", lambda: 1.5)
    monkeypatch.setattr(facts_module.os, "getloadavg", lambda: (0.25, 5.0, 15.0))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = process_facts(3, CPU, 1)
    assert (found.rank, found.cores, found.threads) == (3, 1.5, torch.get_num_threads())
    assert (found.host_memory, found.memory_limit, found.load) == (64, 32, 0.25)
    assert found.sockets == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert found.device.identity.endswith("/cpu:1")


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
    found = devices_of(Job() if alone else Job(2, 4, 3))
    assert [str(device) for device in found] == places
    assert chosen == ([] if alone else found)


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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_speed_is_that_of_the_products(precision, monkeypatch):
    """A run a second has the operations of its products, each a multiplication and an addition, in that precision."""
    operations, product = [], torch.mm

    def counted(left, right, out):
        assert str(out.dtype) == str(left.dtype) == f"torch.{precision}"
        operations.append(2.0 * left.shape[0] * left.shape[1] * right.shape[1])
        return product(left, right, out=out)

    def once(run, seconds):
        operations.clear()
        run()
        return [1.0]

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(speed_module, "timed_windows", once)
    monkeypatch.setattr(speed_module, "LARGEST", {"cpu": 256})  # so small that a run has many
    assert measure_speed(CPU, 5.0, precision).flops == sum(operations) > 0


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


def test_the_slowest_pair_decides_how_much_is_sent(monkeypatch):
    fast, slow = Pairs(8, rate=1e9), Pairs(8, rate=1e6)

    def seconds(control, num_bytes=None):
        found = fast(control, num_bytes)
        found[0, 1] = found[1, 0] = slow(control, num_bytes)[0, 1]
        return found

    monkeypatch.setattr(link_module, "link_seconds", seconds)
    _, rate, _ = measure_pairs(None)
    assert len(fast.asked) == 2, "a larger message would take long between ranks 0 and 1"
    assert rate[0, 1] == pytest.approx(1e6, rel=0.1)


def test_larger_sums_are_left_out_where_they_take_long(monkeypatch):
    control = SimpleNamespace(gather=lambda mine: np.stack([mine, 2 * mine]))
    monkeypatch.setattr(link_module, "all_reduce_seconds", lambda *given: given in asked and given[0] / 4e6)
    asked = [(size, CPU, "group") for size in link_module.SIZES]
    assert measure_sums(control, CPU, "group") == [(size, size / 2e6) for size in (4096, 65536, 1048576)]
    link = LinkFacts("gloo", ((0.0,) * 4,) * 4, ((0.0,) * 4,) * 4, ((1000, 0.5), (9000, 3.0)))
    assert (link.bus_rate(1000, 0.5), link.averaging_rate) == (3000.0, 3000.0)
    assert LinkFacts("gloo").averaging_rate is None


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


def test_the_text_has_a_row_per_rank_and_all_that_is_known():
    text = checkup_text(FULL)
    for line in (
        "versions    lightning-hetero 0.1.0, torch 2.13.0, CUDA 12.8",
        "without     numba",
        'names       strategy="hetero_ddp" needs no import',
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
    assert text.count("latency") == 1, "one pair is the slowest and the fastest"
    assert re.search(r"^without     numba$", text, re.M), "NCCL is no package of its own"
    assert "Advice\n- rank 1 is 2 times slower" in text
    assert "bfloat16, 60 s" in checkup_text(replace(FULL, precision="bfloat16", seconds=60.0))
    assert "RTX 3090 (8.6)" in checkup_text(
        replace(FULL, rows=tuple(replace(row, device=replace(row.device, capability="8.6")) for row in FULL.rows))
    )


def test_a_process_of_its_own_has_no_columns_to_compare():
    lines = checkup_text(Checkup((process(0),), seconds=0.5, speeds={0: Speed(5e13, (), None)})).splitlines()
    header = next(line for line in lines if "free memory" in line)
    assert header.split("  ")[0].strip() == ""
    assert not {"rank", "machine", "fastest"} & set(header.split())
    (row,) = [line for line in lines if line.startswith("0 ")]
    assert row.split()[-3:] == ["50", "TFLOP/s", "-"], "too short to see a change"


def test_long_sentences_are_wrapped_and_indented():
    text = checkup_text(replace(FULL, problems=("set --no-such-option " * 9 + "why?",)))
    wrapped = text.partition("Problems\n")[2].partition("\n\n")[0].splitlines()
    assert len(wrapped) > 1
    assert [line[:2] for line in wrapped] == ["- ", *["  "] * (len(wrapped) - 1)]
    assert " ".join(wrapped).split() == ["-", *["set", "--no-such-option"] * 9, "why?"], "names are not broken"


def test_the_slowest_and_the_fastest_pair_are_named():
    rate = ((0.0, 5e8, 2e9), (5e8, 0.0, 1e6), (2e9, 1e6, 0.0))
    latency = ((0.0, 1e-5, 1e-3), (1e-5, 0.0, 1e-4), (1e-3, 1e-4, 0.0))
    link = LinkFacts("gloo", latency, rate, ((4096, 4096e-6), (65536, 1.0), (1 << 20, 1.0)))
    text = " ".join(checkup_text(Checkup((), 3, link=link)).split())
    assert (
        "slowest pair: ranks 1 and 2, 1 MB/s, latency 100 us fastest pair: ranks 0 and 2, 2 GB/s, latency 1 ms" in text
    )
    assert "4 KiB 4.1 ms 1.33 MB/s 64 KiB 1 s" in text, "each rank sends four thirds of the bytes"


def test_a_checkup_that_failed_early_can_be_written():
    assert "Failed\n- no way." in checkup_text(Checkup((), failures=("no way",)))
    assert document(Checkup((), failures=("no way",)))["failures"] == ["no way"]


def test_more_ranks_than_fit_are_counted():
    text = checkup_text(Checkup(tuple(process(rank) for rank in range(70)), 70))
    assert "... and 6 more (--json lists all)" in text
    assert "70 ranks on 1 machine\n" in text
    assert re.findall(r"^(\d+)  ", text, re.M) == [str(rank) for rank in range(64)]


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


def test_a_host_is_told_from_one_whose_name_it_begins():
    assert without_names("x1.lab and x1", ("x1", "x1.lab")) == "host 1 and host 0"


def test_a_failure_is_a_value_and_a_hang_ends_the_process(monkeypatch):
    def broken():
        raise ValueError("no way.\nAnd more.")

    ended, told, codes = threading.Event(), [], []
    monkeypatch.setattr(group_module.os, "_exit", lambda code: codes.append(code) or ended.set())
    ranks = Ranks(Job(), timeout=0.01, on_hang=told.append)
    assert ranks.gather("speed", lambda: 1 / 0, 100.0) == [Failure("ZeroDivisionError: division by zero")]
    assert ranks.gather("speed", broken, 100.0) == [Failure("ValueError: no way")]
    assert ranks.gather("speed", lambda: ended.wait(0.2), 100.0) == [False], "its own time does not count as a hang"
    assert not told
    assert ranks.gather("speed", lambda: ended.wait(60)) == [True]
    assert told == ["rank 0 did not come back from 'speed' within 0.02 s."]
    assert codes == [1]


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


def test_ranks_that_lose_the_one_that_keeps_the_store_say_so():
    port = free_port()
    kept = [torch.distributed.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)]
    lost = threading.Timer(0.3, kept.clear)
    lost.start()
    with pytest.raises(RanksError, match="the ranks lost each other at 'joined': "):
        Ranks(Job(1, 2), timeout=20.0).join({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    lost.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_other_ranks_can_be_interrupted(rank):
    """Ctrl-C counts at once: nothing else has ended the wait, which would be the interrupt's context."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt) as interrupted:
            Ranks(Job(rank, 2), timeout=20.0).join({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
    assert interrupted.value.__context__ is None
