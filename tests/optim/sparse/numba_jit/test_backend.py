"""Numba's sparse optimizers against those of plain torch, bit by bit."""

import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.compression.host import encoder
from lightning_hetero.optim import SparseAdamW
from tests.optim.sparse.kinds import KINDS as ALIKE

pytest.importorskip("numba", exc_type=ImportError)

from lightning_hetero.optim.sparse.numba_jit import backend as numba_step

SHAPES = ((16 * 40,), (30, 27), (3, 8, 5, 5), (3,), (1,))
KINDS = {**ALIKE, "adamw, short memory": (SparseAdamW, {"lr": 0.01, "betas": (0.3, 0.5), "eps": 1e-3})}


def made(kind, pay, block, loops, monkeypatch):
    """Parameters in two groups, some of them in another order of memory, and an optimizer that takes their blocks."""
    monkeypatch.setattr(encoder, "NUMBA_MIN_ELEMENTS", 0 if loops else 10**9)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    parameters[2].data = parameters[2].data.to(memory_format=torch.channels_last)
    ours, settings = KINDS[kind]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03, "weight_decay": 0.02}]
    optimizer = ours(groups, pay=pay, **settings)
    touched = {}
    optimizer.sparse.follow(lambda: touched["now"], block)
    return parameters, optimizer, touched


def give(parameters, touched, step, block, share):
    generator = torch.Generator().manual_seed(step)
    touched["now"] = None if step == 0 else {}
    for p in parameters:
        rows = -(-p.numel() // block)
        few = (torch.rand(rows, generator=generator) < share).nonzero().view(-1)
        values = torch.randn(rows, block, generator=generator)
        values.view(-1)[p.numel() :] = 0
        if step == 0:
            p.grad = values.view(-1)[: p.numel()].view(p.shape).clone()
        else:
            one = BlockGradient.of(p, few, values[few])
            touched["now"][p], p.grad = one, one.grad


@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("pay", ["ahead", "later"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_torchs_steps(kind, pay, block, monkeypatch):
    """Over steps with rates that change, whole blocks and short last ones, none touched and all; and settled."""
    calls, original = [], numba_step.NumberedBlocks._where

    def counted(self, tensors):
        calls.extend(map(len, self.touched))
        return original(self, tensors)

    monkeypatch.setattr(numba_step.NumberedBlocks, "_where", counted)
    found = []
    for loops in (True, False):
        parameters, optimizer, touched = made(kind, pay, block, loops, monkeypatch)
        if loops:
            calls.clear()  # those that compile
        for step in range(9):
            give(parameters, touched, step, block, share=(0.3, 0.0, 1.0, 0.1)[step % 4])
            for group, lr in zip(optimizer.param_groups, (0.1, 0.02), strict=True):
                group["lr"] = lr * (1 + step % 3)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        found.append([*(p.detach() for p in parameters), *(v for one in state.values() for v in one.values())])
        assert len(calls) == 8 * len(SHAPES), "the loops were asked in each sparse step, and only where they should be"
    assert 0 in calls
    for ours, expected in zip(*found, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_where_it_has_no_form_it_is_torchs(kind, monkeypatch):
    """Parameters of another type, beside those of float32, and a model that is too small for Numba."""
    asked = []
    for name in ("sgd", "adamw"):
        original = getattr(numba_step.NumberedBlocks, name)
        monkeypatch.setattr(
            numba_step.NumberedBlocks,
            name,
            lambda self, *args, original=original, **kw: asked.append(1) or original(self, *args, **kw),
        )
    for dtype, worth, times in ((torch.float64, 0, 1), (torch.bfloat16, 0, 1), (torch.float32, 10**6, 0)):
        monkeypatch.setattr(encoder, "NUMBA_MIN_ELEMENTS", worth)
        ours, settings = KINDS[kind]
        parameters = [nn.Parameter(torch.zeros(64, dtype=dtype)), nn.Parameter(torch.zeros(64))]
        optimizer, touched = ours(parameters, **settings), {}
        optimizer.sparse.follow(lambda touched=touched: touched.get("now"), 16)
        asked.clear()
        for step in range(2):
            for p in parameters:
                one = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16, dtype=p.dtype))
                if step:
                    touched.setdefault("now", {})[p] = one
                p.grad = one.grad if step else one.grad.to_dense()
            optimizer.step()
        assert len(asked) == times
        for p in parameters:
            assert p.detach().nonzero().view(-1).tolist() == list(range(16, 32))
