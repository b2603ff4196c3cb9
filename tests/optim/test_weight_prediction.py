"""What the next step is expected to take from a parameter is what it takes, if the gradient is the expected one."""

import pytest
import torch

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.weight_prediction import expected_move, foresees

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.0),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_the_expected_move_is_the_optimizers_own(kind):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64))
    optimizer = OPTIMIZERS[kind]([p])
    assert foresees(optimizer)
    for gradient in (*torch.randn(4, 4, 5, generator=generator, dtype=torch.float64), torch.zeros_like(p)):
        state = {name: value for name, value in optimizer.state.get(p, {}).items() if isinstance(value, torch.Tensor)}
        known = gradient if gradient.any() else None  # a step with a gradient of 0 still has its momentum
        move = expected_move(optimizer, optimizer.param_groups[0], state, known)
        before, p.grad = p.detach().clone(), gradient.clone()
        optimizer.step()
        taken = before - p.detach()
        torch.testing.assert_close(torch.zeros_like(taken) if move is None else move, taken)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_momentum_that_is_paid_ahead_is_foreseen(kind, nesterov):
    if kind == "adamw" and nesterov:
        pytest.skip("AdamW has no Nesterov momentum")
    p = torch.nn.Parameter(torch.zeros(1024))
    optimizer = (
        SparseSGD([p], lr=0.1, momentum=0.9, nesterov=nesterov) if kind == "sgd" else SparseAdamW([p], weight_decay=0.0)
    )
    current = {}
    optimizer.sparse.follow(lambda: current, block=16)
    for step in range(12):
        rows = torch.tensor([1, 3] if step in (0, 1, 2, 5, 6, 9) else [2])  # waits of 0 and of 2 steps
        places = (rows[:, None] * 16 + torch.arange(16)).view(-1)
        values = torch.randn(len(rows), 16, generator=torch.Generator().manual_seed(step))
        current[p] = BlockGradient.of(p, rows, values)
        p.grad = current[p].grad
        state = {
            name: value[places] if value.dim() else value
            for name, value in optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }
        group = optimizer.param_groups[0]
        kept = optimizer.sparse.kept(group, p, places)
        move = expected_move(optimizer, group, state, values.view(-1), kept=kept)
        before = p.detach().clone()
        optimizer.step()
        if step:  # before the first step there is no momentum that could be paid
            torch.testing.assert_close(before[places] - p.detach()[places], move, rtol=1e-3, atol=1e-6)


def test_other_optimizers_are_not_foreseen():
    assert not foresees(torch.optim.Rprop([torch.nn.Parameter(torch.zeros(1))]))
