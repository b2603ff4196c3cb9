"""Steps by torch's operations, some blocks at a time and in every type."""

import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseSGD
from lightning_hetero.optim.sparse import torch_backend
from tests.optim.sparse.twins import KINDS, gradients, made, same


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_how_many_blocks_are_worked_on_at_once(kind, monkeypatch):
    found = []
    for at_once in (3, 1000):
        monkeypatch.setattr(torch_backend, "AT_ONCE", torch_backend.BlocksAtOnce(at_once, 2 * at_once))
        touched = {}
        parameters, sparse, twins, _ = made(kind, touched)
        for step in range(12):
            gradients(parameters, twins, touched, step, dense=step == 0)
            sparse.step()
        sparse.sparse.flush()
        found.append(parameters)
    same(*found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_is_owed_is_paid_in_every_type(dtype):
    p, given = nn.Parameter(torch.ones(48, dtype=dtype)), {}
    sparse = SparseSGD([p], lr=0.5, weight_decay=0.5)
    sparse.sparse.follow(lambda: given, 16)
    given[p] = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16, dtype=dtype))
    for _ in range(3):
        p.grad = given[p].grad
        sparse.step()
    sparse.sparse.flush()
    assert p[0].item() == pytest.approx(0.75**3, rel=1e-2)
