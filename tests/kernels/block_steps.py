"""Steps of block top-k with a sparse optimizer, without DDP and a model: nothing but what ours do in a step."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.optim import SparseAdamW, SparseSGD


def context_of(parameters, world_size=1, rank=0, **more):
    """Context of an averager with no process group behind it."""
    control = SimpleNamespace(rank=rank, world_size=world_size)
    return AveragerContext(parameters, control, StepTimer(HostClock()), **more)


OPTIMIZERS = {
    "SparseSGD": (SparseSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SparseAdamW": (SparseAdamW, {"weight_decay": 0.1}),
}


class Bucket:
    """DDP's bucket, which holds all gradients."""

    def __init__(self, parameters):
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.owners, parts = parameters, self.flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.flat

    def parameters(self):
        return self.owners

    def gradients(self):
        return [p.grad for p in self.owners]


class BlockSteps:
    """One worker's, in an initialised process group of one; each call is one step.

    Args:
        sizes: elements of each parameter.
        density: share of the blocks.
        values: type of the values on the wire.
        optimizer: one of :data:`OPTIMIZERS`.
        device: of parameters and gradients.
    """

    def __init__(self, sizes, density, values, optimizer, device):
        self.parameters = [nn.Parameter(torch.ones(n, device=device)) for n in sizes]
        named = {f"p{i}": p for i, p in enumerate(self.parameters)}
        settings = BlockTopK(density=density, value_dtype=values, warmup_steps=0)
        self.exchange = BlockTopKAverager(settings, context_of(named, hold_unused=True))
        self.exchange.sparse_steps = True
        kind, arguments = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.parameters, lr=0.01, **arguments)
        self.bucket = Bucket(self.parameters)
        self.optimizer.step()  # dense: it makes the optimizer's state
        self.optimizer.sparse.follow(lambda: self.exchange.gradients, settings.block)
        self.source = torch.randn(len(self.bucket.flat), device=device)

    def __call__(self):
        self.bucket.flat.copy_(self.source)
        self.exchange.average(self.bucket)
        self.exchange.after_backward()
        self.optimizer.step()
