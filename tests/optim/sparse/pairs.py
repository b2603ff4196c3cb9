"""A sparse optimizer and torch's own, through what happens to optimizers in a training."""

from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD

KINDS = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 0.05}),
    "sgd decay": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "momentum decay": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.1, "eps": 1e-13}),
}
BLOCK = 8
SHAPES = {
    "vector": (40,),
    "tail": (29,),
    "scalar": (),
    "one": (1,),
    "empty": (0,),
    "no row": (0, 5),
    "image": (3, 4, 5, 3),
}


@dataclass
class Pair:
    """A sparse optimizer and torch's own, on the same parameters and gradients, in float64."""

    kind: str
    pay: str = "later"
    shapes: tuple = ("vector", "tail", "scalar")
    ours: list = field(default_factory=list)
    theirs: list = field(default_factory=list)
    step_number: int = 0

    def __post_init__(self):
        sparse, dense, settings = KINDS[self.kind]
        self.generator, self.given = torch.Generator().manual_seed(0), None
        pairs = [self.parameter(SHAPES[name]) for name in self.shapes]
        self.sparse = sparse([p for p, _ in pairs], pay=self.pay, **settings)
        self.dense = dense([p for _, p in pairs], **settings)
        self.sparse.sparse.follow(lambda: self.given, BLOCK)

    def parameter(self, shape):
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        self.ours.append(nn.Parameter(value))
        self.theirs.append(nn.Parameter(value.clone()))
        return self.ours[-1], self.theirs[-1]

    def groups(self):
        return zip(self.sparse.param_groups, self.dense.param_groups, strict=True)

    def set(self, **values):
        for groups in self.groups():
            for group in groups:
                group.update({name: value for name, value in values.items() if name in group})

    def add_group(self, shape, **values):
        one, other = self.parameter(shape)
        self.sparse.add_param_group({"params": [one], **values})
        self.dense.add_param_group({"params": [other], **values})

    def step(self, share=0.2, dense=False):
        """The same gradient for both; parameters that are frozen get none."""
        self.given = None if dense else {}
        for p, twin in zip(self.ours, self.theirs, strict=True):
            rows = -(-p.numel() // BLOCK)
            values = torch.randn(rows, BLOCK, generator=self.generator, dtype=torch.float64)
            values.view(-1)[p.numel() :] = 0
            few = (torch.rand(rows, generator=self.generator) < (1.0 if dense else share)).nonzero().view(-1)
            if not p.requires_grad:
                p.grad = twin.grad = None
                continue
            one = BlockGradient.of(p, few, values[few])
            whole = one.grad.to_dense() if one.grad.is_sparse else one.grad.clone()
            twin.grad = torch.empty_like(twin).copy_(whole)
            p.grad = twin.grad.clone() if dense else one.grad
            if not dense:
                self.given[p] = one
        self.sparse.step()
        self.dense.step()
        self.step_number += 1

    def same(self, tolerance=1e-9):
        for p, twin in zip(self.ours, self.theirs, strict=True):
            torch.testing.assert_close(p.detach(), twin.detach(), rtol=tolerance, atol=tolerance)
            state, expected = self.sparse.state.get(p, {}), self.dense.state.get(twin, {})
            for name in expected:
                torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance)


def tolerance_of(kind):
    return 1e-6 if kind == "adamw" else 1e-9
