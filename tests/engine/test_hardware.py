"""What a worker is and could do: CPU quotas of both cgroup versions, identities, the probe of the largest batch."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero import hardware
from lightning_hetero.hardware import capacity, cpu_quota, cpu_share, identity, memory_limit, probe_largest_batch

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A tree in place of ``/proc`` and ``/sys``, on a machine of eight cores."""
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def write(files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


V2 = {"proc/self/cgroup": "0::/job/7\n"}
V1 = {"proc/self/cgroup": "11:memory:/job/7\n4:cpu,cpuacct:/job/7\n1:name=systemd:/\n"}
V1_FOLDER = "sys/fs/cgroup/cpu/job/7/cpu.cfs"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({**V2, "sys/fs/cgroup/job/7/cpu.max": "150000 100000\n"}, 1.5),
        ({**V2, "sys/fs/cgroup/job/7/cpu.max": "max 100000\n"}, 8),
        ({**V1, f"{V1_FOLDER}_quota_us": "50000\n", f"{V1_FOLDER}_period_us": "100000\n"}, 0.5),
        ({**V1, f"{V1_FOLDER}_quota_us": "-1\n", f"{V1_FOLDER}_period_us": "100000\n"}, 8),
        ({"proc/self/cgroup": "nonsense\n"}, 8),
        ({**V2, "sys/fs/cgroup/job/cpu.max": "50000 100000\n", "sys/fs/cgroup/job/7/cpu.max": "max 100000\n"}, 0.5),
    ],
    ids=str,
)
def test_cores_under_a_quota(machine, files, cores):
    machine(files)
    assert cpu_share() == cores


V1_MEMORY = "sys/fs/cgroup/memory/job/7/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, "sys/fs/cgroup/job/7/memory.max": "1000\n"}, 1000),
        ({**V2, "sys/fs/cgroup/job/7/memory.max": "max\n", "sys/fs/cgroup/job/memory.max": "2000\n"}, 2000),
        ({**V1, V1_MEMORY: "4000\n"}, 4000),
        ({**V1, V1_MEMORY: "9223372036854771712\n"}, None),
        ({**V1, "sys/fs/cgroup/cpu/job/7/memory.limit_in_bytes": "5\n"}, None),
    ],
    ids=str,
)
def test_memory_under_a_limit(machine, files, limit):
    machine(files)
    assert memory_limit() == limit


@pytest.mark.parametrize(("threads", "quota", "cores"), [(1, 1.5, None), (2, 1.5, 1.5), (2, 2.0, None)])
def test_a_quota_counts_where_threads_can_reach_it(machine, monkeypatch, threads, quota, cores):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cpu_quota() is None
    machine({**V2, "sys/fs/cgroup/job/7/cpu.max": f"{quota * 100_000:.0f} 100000\n"})
    assert cpu_quota() == cores


def test_capacity_of_a_cpu_follows_its_share_and_its_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    capacities = []
    for share in (0.5, 2.0, 16.0):
        monkeypatch.setattr(hardware, "cpu_share", lambda share=share: share)
        capacities.append(capacity(CPU))
    assert [c / capacities[0] for c in capacities] == [1, 4, 8]


def test_capacity_and_identity_of_a_gpu(monkeypatch):
    def card(uuid, name, major, minor, units, **clock):
        return SimpleNamespace(uuid=uuid, name=name, major=major, minor=minor, multi_processor_count=units, **clock)

    cards = {
        0: card("A", "Tesla T4", 7, 5, 40, clock_rate=1_590_000),
        1: card("B", "Tesla P4", 6, 1, 20, clock_rate=1_063_000),
        2: card("C", "unheard of", 8, 0, 108, clock_rate=1_410_000),
        3: card("D", "unheard of", 8, 0, 108),  # torch versions that do not tell the clock
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    devices = [torch.device("cuda", i) for i in cards]
    assert capacity(devices[0]) / capacity(devices[1]) == pytest.approx(65 / 5.5)
    assert capacity(devices[2]) == pytest.approx(312e12, rel=0.01)
    assert capacity(devices[3]) == pytest.approx(312e12, rel=0.1)
    assert len({identity(d, 0) for d in devices}) == 4
    assert identity(devices[0], 0) == identity(devices[0], 5), "a card stays the same in another slot"


def test_identities_of_cpu_workers_differ_by_host_and_slot(monkeypatch):
    names = []
    for host in ("one", "two"):
        monkeypatch.setattr(hardware.platform, "node", lambda host=host: host)
        names += [identity(CPU, slot) for slot in range(3)]
    assert len(set(names)) == 6


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 4000))
def test_probe_finds_the_bound(bound, start, limit):
    tried = []

    def runs(size):
        tried.append(size)
        return size <= bound

    found = probe_largest_batch(runs, start=start, limit=limit)
    true = min(bound, limit)
    assert all(1 <= size <= limit for size in tried)
    assert found == 0 or found in tried, "the size that is returned has run"
    assert found <= true
    assert true - found <= max(0, found // 16)
    assert len(tried) <= 2 * limit.bit_length() + 2
    assert len(set(tried)) == len(tried)
