"""Triton's sparse optimizers against those of plain torch; `tests/compression/triton_gpu/test_encoder.py` runs this,
interpreted.

Natively, on a machine with a GPU: ``python -m pytest tests/optim/sparse/interpreted.py`` with no TRITON_INTERPRET.
"""

import os

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.optim.sparse import warmup as warming
from lightning_hetero.optim.sparse.block_history import BlockHistory
from lightning_hetero.optim.sparse.triton_gpu import backend as triton_step
from tests.optim.sparse.kinds import KINDS

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


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(triton_step, "SHAPE", triton_step.LaunchShape(tile=16))


def made(kind, pay, dtype, state, touched):
    """An optimizer after its first step, which is dense, and in float32, because in 16 bits it loses much."""
    optimizer_class, settings = KINDS[kind]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, device=DEVICE)) for n in SIZES]
    optimizer = optimizer_class(parameters, pay=pay, **settings)
    optimizer.sparse.follow(lambda: touched["now"], 16)
    for p in parameters:
        p.grad = torch.randn(p.numel(), device=DEVICE)
    touched["now"] = None
    optimizer.step()
    for p in parameters:
        p.grad, p.data = None, p.data.to(dtype)
        buffers = {name: v.to(state) for name, v in optimizer.state[p].items() if v is not None and v.dim()}
        optimizer.state[p].update(buffers)
    return parameters, optimizer


@pytest.mark.parametrize(("kind", "pay", "dtype", "state"), CASES, ids=str)
def test_marked_blocks_move_as_numbered_ones(kind, pay, dtype, state):
    """The kernels and plain torch take the same steps, bit by bit; what is not marked is not read."""
    marks, numbers = {}, {}
    parameters, sparse = made(kind, pay, dtype, state, marks)
    twins, twin = made(kind, pay, dtype, state, numbers)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        marks["now"], numbers["now"] = {}, {}
        for p, other in zip(parameters, twins, strict=True):
            mask = torch.rand(-(-p.numel() // 16), generator=generator) < 0.3
            gradient = torch.randn(p.numel(), generator=generator)
            unmarked = ~mask.repeat_interleave(16)[: p.numel()]
            p.grad = gradient.masked_fill(unmarked, float("nan")).to(DEVICE, dtype)
            rows = mask.nonzero().view(-1).to(DEVICE)
            flat = torch.nn.functional.pad(p.grad, (0, -p.numel() % 16)).view(-1, 16)
            marks["now"][p] = BlockMarks(mask.to(DEVICE), p.grad)
            numbers["now"][other] = BlockGradient.of(other, rows, flat[rows])
            other.grad = numbers["now"][other].grad
        for optimizer in (sparse, twin):
            optimizer.param_groups[0]["lr"] = KINDS[kind][1]["lr"] * (1 + step % 3) / 3
            optimizer.step()
        same(parameters, sparse, twins, twin)
        if step == 2:  # half-way, with waits kept
            sparse.sparse.flush()
            twin.sparse.flush()
    sparse.sparse.flush()
    twin.sparse.flush()
    same(parameters, sparse, twins, twin)


def same(parameters, sparse, twins, twin):
    for p, other in zip(parameters, twins, strict=True):
        assert torch.isfinite(p.detach()).all()
        for value, expected in [(p.detach(), other.detach()), *zip_values(sparse.state[p], twin.state[other])]:
            assert torch.equal(value, expected)


def zip_values(state, expected):
    return [(value, expected[name]) for name, value in state.items() if value is not None]


def test_each_table_of_a_step_has_buffers_of_its_own():
    """With one set for all groups, the host would wait for this very step where there are more groups than turns."""
    steps = triton_step.TritonSteps(16)
    for step in range(3):
        tables = [steps.table(n, np.full((5, 4), 10 * step + n, np.float32), DEVICE) for n in range(9)]
        assert [float(table[2, 1]) for table in tables] == [10 * step + n for n in range(9)]


def test_a_parameter_without_elements():
    p = torch.zeros(0, device=DEVICE)
    marks = torch.zeros(0, dtype=torch.bool, device=DEVICE)
    history = BlockHistory((0, None, 0), 0, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    group = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    steps = triton_step.TritonSteps(16)
    steps.marked(marks, history, None, 0).sgd([p, p], group, remaining=None)
    steps.launch()
    assert p.numel() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_an_optimizer_are_tried_before_training(kind):
    optimizer_class, settings = KINDS[kind]
    parameters = [nn.Parameter(torch.ones(5, dtype=dtype, device=DEVICE)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = optimizer_class(parameters, **settings)
    warming.warm(optimizer.sparse, 16, DEVICE)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_a_step_that_comes_out_wrong_is_found_before_training():
    optimizer = KINDS["sgd"][0]([nn.Parameter(torch.ones(5, device=DEVICE))], lr=float("inf"))
    with pytest.raises(RuntimeError, match="not finite"):
        warming.warm(optimizer.sparse, 16, DEVICE)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_parameters_of_one_launch_move_as_each_of_its_own_would(kind):
    """Some begin between two units of 16 bytes, and gradients are made anew in each step."""
    sizes, moved = (320, 277, 1, 0, 48, 90), []
    for together in (True, False):
        optimizer_class, settings = KINDS[kind]
        generator = torch.Generator().manual_seed(3)
        parameters = [nn.Parameter(torch.randn(n + 1, generator=generator).to(DEVICE)[n % 2 :][:n]) for n in sizes]
        optimizers = [
            optimizer_class(part, **settings) for part in ([parameters] if together else [[p] for p in parameters])
        ]
        given = {}
        for optimizer in optimizers:
            optimizer.sparse.follow(lambda given=given: given or None, 16)
        for step in range(4):
            for p in parameters:
                marks = (torch.rand(-(-p.numel() // 16), generator=generator) < 0.5).to(DEVICE)
                p.grad = torch.randn(p.numel(), generator=generator).to(DEVICE)
                if step:
                    given[p] = BlockMarks(marks, p.grad)
            for optimizer in optimizers:
                optimizer.step()
        moved.append([p.detach().clone() for p in parameters])
    assert all(torch.equal(one, other) for one, other in zip(*moved, strict=True))
    assert not torch.equal(moved[0][0], torch.zeros(320, device=DEVICE))
