"""Sparse optimizers beside torch's dense ones, on the same gradients, in float64."""

import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD

SIZES = (16 * 40, 16 * 25 + 5, 3)
KINDS = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (SparseSGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "momentum decay": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (
        SparseSGD,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    ),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}),
}


def made(kind, touched, dtype=torch.float64):
    ours, theirs, settings = KINDS[kind]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in SIZES]
    sparse = ours(parameters, pay="later", **settings)
    sparse.sparse.follow(lambda: touched["now"], 16)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    return parameters, sparse, twins, theirs(twins, **settings)


def gradients(parameters, twins, touched, step, dense=False):
    """The same gradient for both: 0 but for some blocks; every block of the last parameter is touched at times."""
    generator = torch.Generator().manual_seed(step)
    touched["now"] = None if dense else {}
    for p, twin in zip(parameters, twins, strict=True):
        rows = -(-p.numel() // 16)
        few = (torch.rand(rows, generator=generator) < (0.05 if rows > 1 else 0.4)).nonzero().view(-1)
        g = torch.randn(p.numel(), generator=generator, dtype=p.dtype)
        if dense:
            p.grad, twin.grad = g, g.clone()
            continue
        one = BlockGradient.of(p, few, nn.functional.pad(g, (0, -len(g) % 16)).view(rows, 16)[few])
        touched["now"][p], p.grad = one, one.grad
        twin.grad = one.grad.to_dense()


def same(parameters, twins, **tolerance):
    for p, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), **tolerance)
