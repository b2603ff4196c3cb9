"""Tables of deferred updates: the optimizers' steps without a gradient, and their end."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseSGD
from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates
from lightning_hetero.optim.sparse.kernel_interface import MAX_DEFERRED_STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pay", ["ahead", "later"])
def test_a_block_may_wait_for_longer_than_debts_are_counted(pay, dtype):
    p, given = nn.Parameter(torch.ones(32, dtype=dtype)), {}
    sparse = SparseSGD([p], lr=0.01, momentum=0.9, weight_decay=1e-3, pay=pay)
    p.grad = torch.ones_like(p)
    sparse.step()
    sparse.sparse.follow(lambda: given, 16)
    for step in range(2 * MAX_DEFERRED_STEPS + 11):
        rows = torch.tensor([0, 1] if step in (0, MAX_DEFERRED_STEPS + 5, 2 * MAX_DEFERRED_STEPS + 10) else [0])
        given[p] = BlockGradient.of(p, rows, torch.full((len(rows), 16), 0.1, dtype=dtype))
        p.grad = given[p].grad
        sparse.step()
    sparse.sparse.flush()
    assert torch.isfinite(p).all()
    assert p[16] > 0.5 > p[0]


def momentum_matrix(lr, decay, momentum, nesterov):
    """A step of SGD without a gradient: ``(p, b) -> M (p, b)``."""
    if nesterov:
        return np.array([[1 - lr * decay * (1 + momentum), -lr * momentum**2], [decay, momentum]])
    return np.array([[1 - lr * decay, -lr * momentum], [decay, momentum]])


@pytest.mark.parametrize("nesterov", [False, True])
def test_deferred_momentum_is_a_product_of_matrices(nesterov):
    """With rates that change in every step: row ``n`` is what the last ``n`` steps do."""
    steps = [(0.1 / (i + 1), 0.05 * i, 0.9 - 0.1 * i) for i in range(6)]
    deferred = DeferredUpdates("later")
    for lr, decay, momentum in steps:
        deferred.add_sgd(lr=lr, decay=decay, momentum=momentum, nesterov=nesterov)
    product = np.eye(2)
    for n in range(len(steps) + 1):
        np.testing.assert_allclose(deferred.rows[n], product.ravel(), rtol=1e-12)
        if n < len(steps):
            product = product @ momentum_matrix(*steps[-1 - n], nesterov)
    assert deferred.has_deferred
    assert deferred.steps == len(steps)


@pytest.mark.parametrize(
    ("kind", "decay", "changes"), [("decay", 0.0, False), ("decay", 0.1, True), ("later", 0.0, True)]
)
def test_whether_a_step_without_a_gradient_changes_anything(kind, decay, changes):
    deferred = DeferredUpdates(kind)
    deferred.add_sgd(lr=0.1, decay=decay, momentum=0.9, nesterov=False)
    assert deferred.has_deferred == changes


def test_momentum_that_is_kept_goes_by_the_steps_of_an_interval():
    deferred = DeferredUpdates("interval")
    deferred.keep(0.5)
    assert deferred.rows[:4, 1].tolist() == [1.0, 0.5, 0.25, 0.125]
    deferred.add_sgd(lr=0.1, decay=0.2, momentum=0.5, nesterov=False)
    assert deferred.rows[1, 0] == 1 - 0.1 * 0.2 / (1 - 0.5), "decay counts with what it would do by way of momentum"
    assert deferred.rows[:4, 1].tolist() == [1.0, 0.5, 0.25, 0.125]


def test_deferred_steps_of_adamw_are_those_of_torch():
    """Of one element, after a dense step: five steps with a gradient of 0, at once."""
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-30, "weight_decay": 0.1}
    p = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
    dense, deferred = torch.optim.AdamW([p], **settings), DeferredUpdates("adamw")
    p.grad = torch.tensor([0.3], dtype=torch.float64)
    dense.step()
    before, m, v = p.item(), dense.state[p]["exp_avg"].item(), dense.state[p]["exp_avg_sq"].item()
    p.grad.zero_()
    for number in range(2, 7):
        dense.step()
        deferred.add_adamw(lr=0.01, decay=0.1, betas=(0.8, 0.95), eps=1e-30, number=number)
    c = deferred.rows[5]
    assert c[0] * before - c[1] * m / (v**0.5 + deferred.eps) == pytest.approx(p.item(), rel=1e-12)
    assert c[2] * m == pytest.approx(dense.state[p]["exp_avg"].item())
    assert c[3] * v == pytest.approx(dense.state[p]["exp_avg_sq"].item())
