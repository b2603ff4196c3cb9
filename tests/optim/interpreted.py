"""Triton's sparse optimizers against those of plain torch; `tests/compression/test_kernels.py` runs this, interpreted.

Natively, on a machine with a GPU: ``python -m pytest tests/optim/interpreted.py`` with no TRITON_INTERPRET.
"""

import os

import pytest
import torch
from torch import nn

from lightning_hetero.compression.gradients import BlockGradient, BlockMarks
from lightning_hetero.optim import sparse_steps as module
from lightning_hetero.optim import triton_step
from tests.optim.kinds import KINDS

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SIZES = (16 * 20, 16 * 17 + 5, 1) if DEVICE.type == "cpu" else (1_200_000, 16 * 17 + 5, 1)
CASES = [
    *((kind, "later", torch.float32, torch.float32) for kind in KINDS),
    *((kind, "ahead", torch.float32, torch.float32) for kind in ("momentum", "nesterov", "adamw")),
    ("momentum decay", "later", torch.bfloat16, torch.float32),
    ("momentum", "ahead", torch.float16, torch.float32),
    ("adamw", "later", torch.float16, torch.float32),
    ("adamw", "ahead", torch.bfloat16, torch.float32),
    ("adamw", "ahead", torch.bfloat16, torch.bfloat16),
]
ERROR = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(triton_step, "TILE", 16)
    monkeypatch.setattr(module.SparseSteps, "most", 1.0)


def made(kind, pay, dtype, touched):
    """An optimizer after its first step, which is dense."""
    optimizer_class, settings = KINDS[kind]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n).to(torch.bfloat16).to(DEVICE, dtype)) for n in SIZES]
    optimizer = optimizer_class(parameters, pay=pay, **settings)
    optimizer.sparse.follow(lambda: touched["now"], 16)
    for p in parameters:
        p.grad = torch.randn(p.numel()).to(torch.bfloat16).to(DEVICE, dtype)
    touched["now"] = None
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(("kind", "pay", "dtype", "state"), CASES, ids=str)
def test_marked_blocks_move_as_numbered_ones(kind, pay, dtype, state):
    """The kernels and plain torch, in the type of the state, take the same steps; what is not marked is not read."""
    marks, numbers = {}, {}
    parameters, sparse = made(kind, pay, dtype, marks)
    twins, twin = made(kind, pay, state, numbers)
    for p, other in zip(parameters, twins, strict=True):  # a first step in 16 bits loses much
        p.data.copy_(other.data)
        sparse.state[p] = {name: None if v is None else v.clone() for name, v in twin.state[other].items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        marks["now"], numbers["now"] = {}, {}
        for p, other in zip(parameters, twins, strict=True):
            mask = torch.rand(-(-p.numel() // 16), generator=generator) < 0.3
            gradient = torch.randn(p.numel(), generator=generator)
            unmarked = ~mask.repeat_interleave(16)[: p.numel()]
            p.grad = gradient.masked_fill(unmarked, float("nan")).to(DEVICE, dtype)
            rows = mask.nonzero().view(-1).to(DEVICE)
            flat = torch.nn.functional.pad(p.grad.to(state), (0, -p.numel() % 16)).view(-1, 16)
            marks["now"][p] = BlockMarks(mask.to(DEVICE), p.grad)
            numbers["now"][other] = BlockGradient.of(other, rows, flat[rows])
            other.grad = numbers["now"][other].grad
        for optimizer in (sparse, twin):
            optimizer.param_groups[0]["lr"] = KINDS[kind][1]["lr"] * (1 + step % 3) / 3
            optimizer.step()
        same(parameters, sparse, twins, twin, ERROR[dtype])
    sparse.sparse.settle()
    twin.sparse.settle()
    same(parameters, sparse, twins, twin, ERROR[dtype])


def same(parameters, sparse, twins, twin, error):
    for p, other in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p.detach().to(other.dtype), other.detach(), rtol=error, atol=error)
        assert torch.isfinite(p.detach()).all()
        for name, value in sparse.state[p].items():
            if value is not None:
                torch.testing.assert_close(
                    value.to(torch.float32), twin.state[other][name].float(), rtol=error, atol=error
                )


def test_a_parameter_without_elements():
    p = torch.zeros(0, device=DEVICE)
    marks, settled = (torch.zeros(0, dtype=dtype, device=DEVICE) for dtype in (torch.bool, torch.int64))
    group = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    triton_step.TritonSteps(16, 8).marked(marks, settled, None, 0).sgd([p, p], group, rest=None)
    assert p.numel() == 0
