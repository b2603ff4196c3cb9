"""Backends by device, and subgroups beside a default group that is bound to a GPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement import backends
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from tests.helpers import run_ranks

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("gloo", "gloo", "gloo"),
        ("nccl", "", "nccl"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", ""),
    ],
)
def test_a_device_has_its_own_backend(monkeypatch, config, cpu, cuda):
    monkeypatch.setattr(backends.dist, "get_backend_config", lambda group=None: config)
    assert (backends.backend_of(CPU), backends.backend_of(CUDA)) == (cpu, cuda)


def _bound(rank):
    """Lightning binds the default group to its GPU, whatever the backend."""
    dist.init_process_group("gloo")
    dist.group.WORLD.bound_device_id = CUDA
    topology = Topology(rank, ((0, 1), (2,)))
    control = ControlPlane(rank, 3)
    buffer = torch.full((3,), float(rank))
    topology.all_reduce(buffer).wait()
    return buffer.tolist(), control.gather_objects(rank), str(dist.group.WORLD.bound_device_id)


def test_clusters_and_agreement_work_beside_a_default_group_that_is_bound_to_a_gpu():
    assert run_ranks(_bound, 3) == [([3.0, 3.0, 3.0], [0, 1, 2], "cuda:0")] * 3


def test_a_backend_that_can_be_split_stays_bound(monkeypatch):
    default = SimpleNamespace(bound_device_id=CUDA)
    seen = []
    monkeypatch.setattr(backends.dist, "get_backend_config", lambda group=None: "nccl")
    monkeypatch.setattr(backends.dist, "group", SimpleNamespace(WORLD=default))
    monkeypatch.setattr(
        backends.dist, "new_group", lambda ranks: seen.append(backends.dist.group.WORLD.bound_device_id)
    )
    backends.new_group([0])
    assert seen == [CUDA]
