"""Backends by device and by rank, and subgroups beside a default group that is bound to a GPU."""

import os
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero.comm.agreement import backends
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from tests.helpers import Points, Regressor, run_ranks, trainer_of

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


WITHIN = timedelta(seconds=5)


def _trainer(backend, ranks, strategy):
    strategy = getattr(lightning_hetero, strategy)(process_group_backend=backend, timeout=WITHIN)
    trainer_of(strategy, ranks).fit(Regressor(), DataLoader(Points(16), 2))


def _fabric(backend, ranks, _):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    strategy = HeteroDDPStrategy(process_group_backend=backend, timeout=WITHIN)
    Fabric(accelerator="cpu", devices=ranks, strategy=strategy).launch()


def _accelerator(backend, *_):
    from accelerate.utils import InitProcessGroupKwargs

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    handler = InitProcessGroupKwargs(backend=backend, timeout=WITHIN)
    HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(), kwargs_handlers=[handler])


def _joins(rank, join, backends, *args):
    join(backends[rank], len(backends), *args)


@pytest.mark.parametrize(
    ("join", "backends", "name"),
    [
        (_trainer, ("gloo", "nccl"), "HeteroDDPStrategy"),
        (_trainer, ("cpu:gloo,cuda:nccl", "gloo", "gloo"), "HeteroFSDPStrategy"),
        (_trainer, ("mpi", "gloo"), "HeteroElasticStrategy"),
        (_trainer, ("nccl", "nccl"), "HeteroDDPStrategy"),
        (_fabric, ("gloo", "nccl"), None),
        (_accelerator, ("gloo", "mpi"), None),
    ],
    ids=["ddp", "fsdp", "elastic", "no GPU", "Fabric", "Accelerate"],
)
def test_ranks_whose_backends_do_not_fit_are_refused_before_they_wait_for_each_other(join, backends, name):
    errors = run_ranks(_joins, len(backends), join, backends, name, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(rank, "ValueError") for rank in range(len(backends))]
    assert all("process_group_backend" in text and "InitProcessGroupKwargs" in text for *_, text in errors)


def _joins_again(rank):
    """How many keys the store has after the first comparison, and after more; each agent has its count of restarts."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    compare = partial(backends.compare_backends, "gloo", CPU, rank=rank, world_size=3, timeout=WITHIN)
    store = compare()
    dist.init_process_group("gloo")
    keys = []
    for _ in range(3):
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
        compare()
    return keys


def test_comparing_backends_again_leaves_no_more_in_the_store():
    assert all(len(set(keys)) == 1 for keys in run_ranks(_joins_again, 3))


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
        backends.dist, "new_group", lambda ranks, **_: seen.append(backends.dist.group.WORLD.bound_device_id)
    )
    backends.new_group([0])
    assert seen == [CUDA]
