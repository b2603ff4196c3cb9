"""One job on workers of the same and of different kinds: a GPU beside a CPU over gloo, GPUs over NCCL.

What needs a GPU is marked; the pair of CPUs shows the same tests at work without one.
"""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, GNSCallback, HeteroDDPStrategy
from lightning_hetero.strategies._lightning.probes.memory import largest_training_batch
from tests.helpers import Points, Regressor, covered, trainer_of
from tests.ranks import run_ranks

GROUPS = [
    ("cpu", "cpu"),
    ("cpu", "cpu", "cpu"),
    *(
        pytest.param(group, marks=pytest.mark.gpu)
        for group in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cpu", "cpu"), ("cpu", "cuda", "cuda"))
    ),
]
BLOCKS, FEW = (BlockTopK(density=density, block=4, warmup_steps=1) for density in (0.5, 0.2))
EXCHANGES = {
    "dense": {},
    "late": {"staleness": 1},
    "block top-k": {"compression": BLOCKS},
    "block top-k, sparse optimizer": {"compression": BLOCKS, "sparse_optimizer": True},
    "few blocks, sparse optimizer": {"compression": FEW, "sparse_optimizer": True},
    "float16": {"compression": "fp16"},
    "bfloat16": {"compression": "bf16"},
    "PowerSGD": {"compression": "powersgd"},
}
N, TOTAL, EPOCHS = 64, 8, 3


def need_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPU" + "s" * (count > 1))


KEPT = ("block top-k", "block top-k, sparse optimizer", "PowerSGD")


class Measured(Regressor):
    """Remembers where it ran and what was measured there; gradients stay on their device."""

    def on_before_optimizer_step(self, optimizer):
        self.place = self.device.type


class Overflows(Measured):
    """Rank 1 has a gradient that is not finite, once."""

    def loss(self, batch):
        once = self.trainer.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 5
        return super().loss(batch) * (float("inf") if once else 1.0)


def _fit(rank, strategy, world_size, model=Measured, **kwargs):
    dtype = torch.float32 if isinstance(strategy, dict) and "compression" in strategy else torch.float64
    model = model(dtype=dtype)
    trainer = trainer_of(
        strategy if isinstance(strategy, str) else HeteroDDPStrategy(**strategy),
        world_size,
        max_epochs=EPOCHS,
        callbacks=[] if isinstance(strategy, str) else [GNSCallback()],
        **kwargs,
    )
    share = TOTAL // trainer.world_size
    trainer.fit(model, DataLoader(Points(N, dtype=dtype), share, shuffle=True))
    watched = trainer.strategy.observations() if isinstance(strategy, dict) else None
    return {"weights": model.flat(), "seen": model.seen, "place": model.place, "observations": watched}


TRAININGS = {
    2: [*((name, Measured) for name in EXCHANGES), *((name, Overflows) for name in KEPT)],
    3: [(name, Measured) for name in ("dense", "block top-k", "late")],  # in clusters
}


def _fit_beside(rank, devices):
    """Machines of one device each, which meet over gloo; the trainings one after another."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    settings = {"local_batch_sizes": [6, 2]} if len(devices) == 2 else {"local_batch_sizes": [3, 1, 2]}
    clusters = {"hierarchy": [[0, 1], [2]]} if len(devices) == 3 else {}
    kind, found = "gpu" if devices[rank] == "cuda" else "cpu", []
    for name, model in TRAININGS[len(devices)]:
        strategy = {**settings, "process_group_backend": "gloo", **clusters, **EXCHANGES[name]}
        found.append(_fit(rank, strategy, 1, model, num_nodes=len(devices), accelerator=kind))
    return found


def _fit_over_nccl(rank, world_size, strategy):
    return _fit(rank, strategy, world_size, accelerator="gpu")


def agree(results):
    """The same weights everywhere, each sample once an epoch, and times measured by every worker's own clock."""
    for result in results:
        rtol = 1e-9 if result["weights"].dtype == np.float64 else 1e-5
        np.testing.assert_allclose(result["weights"], results[0]["weights"], rtol=rtol, atol=rtol)
        watched = result["observations"]
        assert watched.num_steps > 0
        for seconds in (watched.data_wait, watched.forward, watched.backward, watched.optimizer, watched.bucket_ends):
            assert np.isfinite(seconds).all()
            assert (seconds > 0).all()
        assert (watched.bucket_ends >= watched.first_bucket[:, :, None]).all()
    for epoch in range(EPOCHS):
        assert covered(results, epoch) == list(range(N))


def one_process():
    return run_ranks(_fit, 1, "ddp", 1, timeout=240)[0]["weights"]


@pytest.mark.parametrize("devices", GROUPS, ids="-".join)
def test_workers_of_two_kinds_train_one_model(devices):
    """Three in clusters: a GPU's streams are in order all the way. A step that is not finite is left out by all."""
    need_gpus("cuda" in devices)
    ranks = run_ranks(_fit_beside, len(devices), devices, start="spawn" if "cuda" in devices else "fork", timeout=240)
    for (name, model), results in zip(TRAININGS[len(devices)], zip(*ranks, strict=True), strict=True):
        assert tuple(result["place"] for result in results) == devices
        assert np.isfinite(results[0]["weights"]).all()
        agree(results)
        if (name, model) == ("dense", Measured) and len(devices) == 2:
            np.testing.assert_allclose(results[0]["weights"], one_process(), rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_gpu_for_each_rank_over_nccl(kind):
    need_gpus(1)
    world_size = 2 if torch.cuda.device_count() > 1 else 1
    strategy = {"process_group_backend": "nccl", **EXCHANGES[kind]}
    results = run_ranks(_fit_over_nccl, world_size, world_size, strategy, start="spawn", timeout=240)
    agree(results)
    if kind == "dense":
        np.testing.assert_allclose(results[0]["weights"], one_process(), rtol=1e-9, atol=1e-12)


class Wide(Regressor):
    """Keeps 16 MiB of activations for each sample."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.net = nn.Sequential(nn.Linear(5, 2**22), nn.Tanh(), nn.Linear(2**22, 1))


def _largest(rank):
    """The bound that is found in 2 GiB, and what happens there and a quarter above."""
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.get_device_properties(device).total_memory)
    model = Wide().to(device)
    found = largest_training_batch(model, DataLoader(Points(16, dtype=torch.float32), 4), device, limit=4096)

    def fits(size):
        try:
            model.zero_grad()
            batch = torch.randn(size, 5), torch.randn(size, 1), torch.arange(size)
            model.loss([part.to(device) for part in batch]).backward()
        except torch.OutOfMemoryError:
            return False
        return True

    return found, fits(found), fits(found + found // 4 + 1)


@pytest.mark.gpu
def test_the_memory_of_a_gpu_bounds_the_batch():
    need_gpus(1)
    ((found, fits, fits_more),) = run_ranks(_largest, 1, start="spawn", timeout=240)
    assert 1 <= found < 4096
    assert fits
    assert not fits_more


def _taken(rank, optimizer):
    """What 8 steps of block top-k take from the allocator, and how often the host waits for an event.

    To wait for the device in another way is an error in them; torch's debug mode does not see waits for events.
    """
    from tests.kernels.block_steps import BlockSteps

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    step = BlockSteps((3_000_001, 700), 0.01, "bfloat16", optimizer, torch.device("cuda", 0))
    for _ in range(8):  # kernels are compiled
        step()
    torch.cuda.synchronize()
    waits, wait = [], torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = lambda event: (waits.append(event), wait(event))[1]
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(8):
        step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.Event.synchronize = wait
    after = torch.cuda.memory_stats()
    moved = float((step.parameters[0] != 1).float().mean())
    counts = [after[name] - before[name] for name in ("segment.all.allocated", "allocation.all.allocated")]
    return *counts, len(waits), moved


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["SparseSGD", "SparseAdamW"])
def test_a_step_of_block_top_k_allocates_nothing_on_a_gpu_and_waits_for_nothing(optimizer):
    """Neither memory of the device, nor of the allocator; events of the step before alone are waited for."""
    need_gpus(1)
    ((segments, allocated, waits, moved),) = run_ranks(_taken, 1, optimizer, start="spawn", timeout=240)
    assert segments == 0
    assert allocated == 0
    assert waits <= 2 * 8, "one for what became of the step before, one for a table that is uploaded"
    assert moved > 0
