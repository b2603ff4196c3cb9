"""AdamW on blocks: eps, and betas of a short memory."""

import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW
from lightning_hetero.optim.sparse.adamw import AdamWRule
from tests.optim.sparse.twins import same


def test_a_large_eps_counts_as_in_the_step_that_is_owed():
    """Of AdamW, also in the first steps, whose second moment is far from its mean."""
    p, twin = (nn.Parameter(torch.ones(32, dtype=torch.float64)) for _ in range(2))
    settings, given = {"lr": 0.1, "eps": 0.3}, {}
    sparse, dense = SparseAdamW([p], pay="later", **settings), torch.optim.AdamW([twin], **settings)
    for step in range(3):
        rows = torch.tensor([0, 1] if step < 2 else [0])
        given[p] = BlockGradient.of(p, rows, torch.ones(len(rows), 16, dtype=torch.float64))
        p.grad, twin.grad = given[p].grad if step else given[p].grad.to_dense(), given[p].grad.to_dense()
        sparse.step()
        dense.step()
        if step == 0:
            sparse.sparse.follow(lambda: given, 16)
    sparse.sparse.flush()
    same([p], [twin], rtol=1e-4, atol=0.0)


def test_betas_of_a_short_second_memory_stay_finite():
    """Factors beyond float32 times a moment of 0 are 0."""
    p = nn.Parameter(torch.ones(16))
    optimizer, given = SparseAdamW([p], lr=1e-3, betas=(0.9, 0.3)), {}
    optimizer.sparse.follow(lambda: given or None, 8)
    p.grad = torch.ones(16)
    for step in range(400):
        optimizer.step()
        rows = torch.tensor([0] if step < 399 else [0, 1])
        given[p] = BlockGradient.of(p, rows, torch.zeros(len(rows), 8))
        p.grad = given[p].grad
    optimizer.sparse.flush()
    assert torch.isfinite(p).all()


def test_steps_are_counted_as_torch_counts_them():
    rule, state = AdamWRule(), {"step": torch.tensor(3.0)}
    assert (rule.steps_taken({}), rule.steps_taken(state)) == (0, 3)
    rule.count_step(state)
    assert state["step"].item() == 4


def test_nothing_is_kept_of_a_first_moment_that_is_applied_ahead():
    assert AdamWRule("ahead").kept_share({}, None).item() == 0.0
    assert AdamWRule("later").kept_share({}, None) is None
