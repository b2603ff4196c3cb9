"""Training where the device decides, against training where the host does; `test_triton.py` runs this, interpreted.

Two ranks with DDP: block top-k by Triton's kernels on CPU, and a sparse optimizer that gets marks instead of numbers.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero import BlockTopK
from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.compression.triton_gpu import launch
from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse import lazy_update
from tests.gradients.runs import Run, Way
from tests.ranks import run_ranks

SETTINGS = {"density": 0.3, "selector": "histogram", "warmup_steps": 1}
STEPS, POISONED, SPOILED = 6, 3, 4
KINDS = {
    "momentum": lambda p: SparseSGD(p, lr=0.05, momentum=0.5, weight_decay=0.01),
    "nesterov, later": lambda p: SparseSGD(p, lr=0.05, momentum=0.8, weight_decay=0.05, nesterov=True, pay="later"),
    "adamw": lambda p: SparseAdamW(p, lr=0.01, weight_decay=0.1),
}
MIXED = [(0.02, "momentum", 10), (0.3, "momentum", 10), (0.5, "momentum", 10), (0.2, "nesterov, later", 10)]
MIXED += [(0.2, "momentum", 30), (0.2, "adamw", 20)]
"""Density, optimizer and steps of trainings on a GPU and without one; a step takes a sixth of a second."""
host_encoder = BlockTopKAverager._encoder


def on_device(exchange, parameters, hold_unused):
    """The encoder that a GPU would have."""
    form = host_encoder(exchange, parameters, hold_unused).form
    return TritonEncoder(exchange.model.layout, form, torch.device("cpu"), 2)


def begin(rank, kind="momentum", **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    run = Run(rank, Way(BlockTopK(**{**SETTINGS, **settings}), cap=1e-4), model=model)
    run.optimizer = KINDS[kind](model.parameters())
    run.compression.bind_optimizers([run.optimizer])
    return run


def train(rank, *, spoil=False):
    """Weights after each step, what ended it, and what was reported of it; one bit of a message may be wrong."""
    run, gather = begin(rank), async_ops.async_all_gather

    def spoiled(rows, *args):
        done = gather(rows, *args)
        if run.compression.averager.step == SPOILED:
            done.wait()
            rows[0, -1] ^= 4
        return done

    with pytest.MonkeyPatch.context() as patch:
        if spoil:
            patch.setattr(async_ops, "async_all_gather", spoiled)
        try:
            for step in range(STEPS):
                run.step(step, bad=rank == 1 and step == POISONED)
        except ValueError as error:
            return run.seen["weights"], str(error), None
    report = run.compression.take_report()
    return run.seen["weights"], None, (report.density, report.steps, run.compression.averager.dropped.count)


def both_ways(rank):
    launch.TILING = launch.Tiling(blocks=128, repeats=1, scores=128)
    lazy_update.LazyUpdate.max_sparse_density = 1.0
    on_host = train(rank)
    BlockTopKAverager._encoder = on_device
    return on_host, train(rank), train(rank, spoil=True)


def test_the_device_decides_as_the_host_does():
    """Same weights, also around a gradient that is not finite; a spoiled message moves nothing and ends all ranks."""
    results = run_ranks(both_ways, 2, start="fork")
    for (host, _, seen), (weights, ended, reported), (spoiled, error, _) in results:
        np.testing.assert_allclose(weights, host, rtol=1e-5, atol=1e-6)
        assert ended is None
        assert reported == (pytest.approx(seen[0]), STEPS, 1)
        assert seen[1:] == (STEPS, 1)
        moved = [not np.array_equal(a, b) for a, b in zip(weights[:-1], weights[1:], strict=True)]
        assert moved == [step != POISONED for step in range(1, STEPS)]
        assert re.search(r"rank 0, bucket 0, step 4 .*checksum", error)
        assert len(spoiled) == SPOILED + 1, "it is seen one step later"
        np.testing.assert_array_equal(spoiled[SPOILED], spoiled[SPOILED - 1])
    for one, other in zip(results[0], results[1], strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def mixed(rank):
    """Rank 1 has a GPU, rank 0 has none."""
    launch.TILING = launch.Tiling(blocks=128, repeats=1, scores=128)
    if rank == 1:
        BlockTopKAverager._encoder = on_device
    found = []
    for density, kind, steps in MIXED:
        run = begin(rank, kind, density=density, dense_every=9)
        for step in range(steps):
            run.step(step)
        found.append(np.stack(run.seen["weights"]))
    return found


def test_replicas_with_and_without_a_gpu_stay_equal_bit_by_bit():
    """Whether a step is sparse is what all ranks agreed on, and each operation of it rounds alike everywhere."""
    host, device = run_ranks(mixed, 2, timeout=1200, start="fork")
    for (density, kind, steps), one, other in zip(MIXED, host, device, strict=True):
        assert len(one) == len(other) == steps
        moved = np.count_nonzero(np.diff(one, axis=0), axis=1) / one[0].size
        assert (np.median(moved) < 0.9) == (density <= 0.3), "sparse steps up to that density"
        np.testing.assert_array_equal(one, other, err_msg=f"{density}, {kind}")
