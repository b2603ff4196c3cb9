"""Training where the device decides, against training where the host does; `test_triton.py` runs this, interpreted.

Two ranks with DDP: block top-k by Triton's kernels on CPU, and a sparse optimizer that gets marks instead of numbers.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import BlockTopK
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.compression.triton_gpu import encoder as triton_encoder
from lightning_hetero.compression.triton_gpu import launch
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse import lazy_update
from tests.ranks import run_ranks

TINY = 1e-4  # MB: one bucket for each parameter that does not fit into the first


def batches(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(3)]


def loss_of(model, x):
    return model(x).square().mean()


SETTINGS = BlockTopK(density=0.3, selector="histogram", warmup_steps=1)
STEPS, POISONED, SPOILED = 6, 3, 4


KINDS = {
    "momentum": lambda p: SparseSGD(p, lr=0.05, momentum=0.5, weight_decay=0.01),
    "nesterov, later": lambda p: SparseSGD(p, lr=0.05, momentum=0.8, weight_decay=0.05, nesterov=True, pay="later"),
    "adamw": lambda p: SparseAdamW(p, lr=0.01, weight_decay=0.1),
}
FEW_STEPS = int(os.environ.get("MIXED_STEPS", "10"))  # 200 for all take three minutes
"""In the interpreter a step takes a sixth of a second."""
LONG = [
    *((density, "momentum", FEW_STEPS) for density in (0.02, 0.3, 0.5)),
    (0.2, "nesterov, later", FEW_STEPS),
    (0.2, "momentum", 30),
    (0.2, "adamw", 20),
]
"""Density, optimizer and steps of trainings on a GPU and without one."""


def on_device(exchange, parameters, hold_unused):
    """The encoder that a GPU would have."""
    form = host_encoder(exchange, parameters, hold_unused).form
    return triton_encoder.TritonEncoder(exchange.model.layout, form, torch.device("cpu"), 2)


host_encoder = BlockTopKAverager._encoder


def train(rank, *, spoil, settings=SETTINGS, kind="momentum", steps=STEPS):
    """Weights after each step, what ended it, and what was reported of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=TINY)
    state = HookState(StepTimer(HostClock()), 2)
    compression = GradientCompression(settings, ControlPlane(rank, 2), state)
    compression.attach(model)
    ddp.register_comm_hook(state, gradient_hook)
    optimizer = KINDS[kind](model.parameters())
    compression.bind_optimizers([optimizer])
    gather = sums.async_all_gather

    def spoiled(rows, *args):
        done = gather(rows, *args)
        if spoil and compression.averager.step == SPOILED:
            done.wait()
            rows[0, -1] ^= 4
        return done

    sums.async_all_gather = spoiled
    weights, ended = [], None
    try:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(ddp, batches(rank)[step % 3])
            (loss * float("inf") if rank == 1 and step == POISONED else loss).backward()
            compression.after_backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy())
        report = compression.take_report()
        return weights, ended, (report.steps, report.density, report.encode > 0, compression.averager.dropped.count)
    except ValueError as error:
        return weights, str(error), None
    finally:
        sums.async_all_gather = gather


def both_ways(rank):
    dist.init_process_group("gloo")
    launch.TILING = launch.Tiling(blocks=128, repeats=1, scores=128)
    lazy_update.LazyUpdate.max_sparse_density = 1.0
    on_host = train(rank, spoil=False)
    BlockTopKAverager._encoder = on_device
    return on_host, train(rank, spoil=False), train(rank, spoil=True)


def test_the_device_decides_as_the_host_does():
    """Same weights, also around a gradient that is not finite; a spoiled message moves nothing and ends all ranks."""
    results = run_ranks(both_ways, 2, start="fork")
    for (host, _, seen), (weights, ended, reported), (spoiled, error, _) in results:
        np.testing.assert_allclose(weights, host, rtol=1e-5, atol=1e-6)
        assert ended is None
        assert (reported[0], reported[2:]) == (seen[0], seen[2:]) == (STEPS, (True, 1))
        np.testing.assert_allclose(reported[1], seen[1])
        moved = [not np.array_equal(a, b) for a, b in zip(weights[:-1], weights[1:], strict=True)]
        assert moved == [step != POISONED for step in range(1, STEPS)]
        assert "the gradient message of rank 0, bucket 0, step 4 is refused: checksum" in error
        assert len(spoiled) == SPOILED + 1, "it is seen one step later"
        np.testing.assert_array_equal(spoiled[SPOILED], spoiled[SPOILED - 1])
    for one, other in zip(results[0], results[1], strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def mixed(rank, long):
    """Rank 1 has a GPU, rank 0 has none."""
    dist.init_process_group("gloo")
    launch.TILING = launch.Tiling(blocks=128, repeats=1, scores=128)
    if rank == 1:
        BlockTopKAverager._encoder = on_device
    found = []
    for density, kind, steps in long:
        settings = BlockTopK(density=density, selector="histogram", warmup_steps=1, dense_every=9)
        found.append(train(rank, spoil=False, settings=settings, kind=kind, steps=steps)[0])
    return found


def test_replicas_with_and_without_a_gpu_stay_equal_bit_by_bit():
    """Whether a step is sparse is what all ranks agreed on, and each operation of it rounds alike everywhere."""
    host, device = run_ranks(mixed, 2, LONG, timeout=1200, start="fork")
    for (density, kind, steps), one, other in zip(LONG, host, device, strict=True):
        assert len(one) == len(other) == steps
        moved = np.count_nonzero(np.diff(one, axis=0), axis=1) / one[0].size
        assert (np.median(moved) < 0.9) == (density <= 0.3), "sparse steps up to that density"
        np.testing.assert_array_equal(one, other, err_msg=f"{density}, {kind}")
