"""Sparse optimizers against torch's dense ones: the same parameters and state once all debts are paid."""

import copy

import pytest
import torch
from torch import nn

from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim import sparse as module

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


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(module, "BREAK_EVEN", 0.5)


def made(kind, touched, dtype=torch.float64):
    ours, theirs, settings = KINDS[kind]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in SIZES]
    sparse = ours(parameters, pay="later", **settings)
    sparse.follow(lambda: touched["now"], 16)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    return parameters, sparse, twins, theirs(twins, **settings)


def gradients(parameters, twins, touched, step, dense=False):
    """The same gradient for both: 0 but for some blocks; every block of the last parameter is touched at times."""
    generator = torch.Generator().manual_seed(step)
    touched["now"] = None if dense else {}
    for p, twin in zip(parameters, twins, strict=True):
        rows = -(-p.numel() // 16)
        few = (torch.rand(rows, generator=generator) < (0.05 if rows > 1 else 0.4)).nonzero().view(-1)
        mask = torch.zeros(rows, 16, dtype=p.dtype)
        mask[few] = 1.0
        g = torch.randn(p.numel(), generator=generator, dtype=p.dtype)
        p.grad = g if dense else g * mask.view(-1)[: p.numel()]
        twin.grad = p.grad.clone()
        if not dense:
            touched["now"][p] = few


def same(parameters, twins, **tolerance):
    for p, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_settled_it_is_the_dense_optimizer(kind, monkeypatch):
    """Over 60 steps with a learning rate that changes in each: parameters and state, to rounding."""
    monkeypatch.setattr(module, "EPSILON", 1e-14)
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    behind = 0
    for step in range(60):
        gradients(parameters, twins, touched, step, dense=step in (0, 1, 30))
        for optimizer in (sparse, dense):
            optimizer.param_groups[0]["lr"] = KINDS[kind][2]["lr"] * (1 + step % 7) / 7
            optimizer.step()
        behind += any(not torch.allclose(p, t, rtol=1e-9) for p, t in zip(parameters, twins, strict=True))
    assert behind > 40 or kind == "sgd", "nothing was owed, so nothing was tested"
    state = sparse.state_dict()
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if kind != "adamw" else {"rtol": 1e-6, "atol": 1e-8}
    same(parameters, twins, **tolerance)
    for ours, theirs in zip(state["state"].values(), dense.state_dict()["state"].values(), strict=True):
        assert set(ours) == set(theirs)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_debts_end(kind, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 7)
    monkeypatch.setattr(module, "EPSILON", 1e-14)
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(22):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
        if step and step % 7 == 0:
            same(parameters, twins, rtol=1e-6, atol=1e-8)


def test_only_touched_blocks_are_written():
    touched = {}
    parameters, sparse, twins, _ = made("momentum decay", touched)
    for step in range(2):
        gradients(parameters, twins, touched, step, dense=step == 0)
        before = [p.detach().clone() for p in parameters]
        sparse.step()
    for p, was in zip(parameters, before, strict=True):
        changed = torch.nn.functional.pad((p != was).detach(), (0, -p.numel() % 16)).view(-1, 16).any(1).nonzero()
        assert set(changed.view(-1).tolist()) <= set(touched["now"][p].tolist())
        assert len(changed) < 10


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_and_from_torch(kind):
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(4):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
    ours, theirs = copy.deepcopy(sparse.state_dict()), copy.deepcopy(dense.state_dict())
    sparse.load_state_dict(theirs)
    dense.load_state_dict(ours)
    for p, twin in zip(parameters, twins, strict=True):
        p.data.copy_(twin.data)
    sparse.state_dict()
    gradients(parameters, twins, touched, 9, dense=True)
    sparse.step()
    dense.step()
    same(parameters, twins, rtol=1e-4, atol=1e-5)


def test_without_a_source_and_with_many_blocks_it_is_dense():
    touched = {}
    parameters, sparse, twins, dense = made("momentum decay", touched)
    sparse._touched = None
    for step in range(3):
        gradients(parameters, twins, touched, step)
        sparse.step()
        dense.step()
    same(parameters, twins, rtol=0, atol=0)
    sparse.follow(lambda: {p: torch.arange(-(-p.numel() // 16)) for p in parameters}, 16)
    for step in range(3):
        gradients(parameters, twins, touched, step, dense=True)
        sparse.step()
        dense.step()
    same(parameters, twins, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw"])
def test_paid_ahead_a_block_is_at_once_where_the_dense_optimizer_takes_it(kind):
    """One touch, then nothing: the dense optimizer gets there after hundreds of steps without a gradient."""
    ours, theirs, settings = KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}
    p = nn.Parameter(torch.randn(16 * 40, dtype=torch.float64))
    twin = nn.Parameter(p.detach().clone())
    sparse, dense = ours([p], **settings), theirs([twin], **settings)
    for parameter, optimizer in ((p, sparse), (twin, dense)):
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
    for state in (sparse.state[p], dense.state[twin]):
        state["momentum_buffer" if "exp_avg" not in state else "exp_avg"].zero_()
        if kind == "adamw":
            state["step"].fill_(20_000)  # its bias corrections would change for thousands of steps
    for parameter in (p, twin):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[32:48] = torch.linspace(-2, 2, 16, dtype=torch.float64)
    sparse.follow(lambda: {p: torch.tensor([2])}, 16)
    sparse.step()
    dense.step()
    twin.grad.zero_()
    for _ in range(400):
        dense.step()
    torch.testing.assert_close(p.detach()[32:48], twin.detach()[32:48], rtol=1e-6, atol=1e-9)


def test_pay_is_one_of_two():
    with pytest.raises(ValueError, match="pay='never' is unknown; allowed are 'ahead', 'later'"):
        SparseSGD([nn.Parameter(torch.zeros(3))], lr=0.1, pay="never")
