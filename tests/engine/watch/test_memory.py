"""Each rank tells the others the most memory that it has used."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.engine.watch.memory import MemoryUse


def test_a_cpu_worker_tells_the_memory_of_its_process():
    use = MemoryUse(torch.device("cpu"))
    (own,) = use.pack()
    assert 1e7 < own < 1e13
    keep = torch.ones(20_000_000)
    assert use.pack()[0] >= own
    del keep
    assert use.everyone == ()
    use.unpack(np.array([[own], [2e9]]), None)
    assert use.everyone == (own, 2e9)


def test_a_gpu_worker_tells_the_memory_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123 + torch.device(device).index)
    assert MemoryUse(torch.device("cuda", 2)).pack().tolist() == [125.0]


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_systems_have_units_of_their_own(monkeypatch, platform, unit):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    assert MemoryUse(torch.device("cpu")).pack().tolist() == [3_000_000 * unit]


def test_where_the_system_does_not_say_it_is_not_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(MemoryUse(torch.device("cpu")).pack()[0])
