"""Sparse optimizers as users meet them: torch's arguments, torch's state, and the dense optimizer's weights."""

import copy
import inspect

import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse.optimizers import attach_lazy_update
from tests.optim.sparse.twins import KINDS, gradients, made, same


@pytest.mark.parametrize("kind", KINDS)
def test_settled_it_is_the_dense_optimizer(kind):
    """Over 60 steps with a learning rate that changes in each: parameters and state, to rounding."""
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


def test_only_touched_blocks_are_written():
    touched = {}
    parameters, sparse, twins, _ = made("momentum decay", touched)
    for step in range(2):
        gradients(parameters, twins, touched, step, dense=step == 0)
        before = [p.detach().clone() for p in parameters]
        sparse.step()
    for p, was in zip(parameters, before, strict=True):
        changed = torch.nn.functional.pad((p != was).detach(), (0, -p.numel() % 16)).view(-1, 16).any(1).nonzero()
        assert set(changed.view(-1).tolist()) <= set(touched["now"][p].rows.tolist())
        assert len(changed) < 10
        assert p.grad is touched["now"][p].grad, "the gradient is there after the step as well"


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


@pytest.mark.parametrize(("kind", "settings"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_torchs_own_optimizer_stays_itself(kind, settings):
    """With a closure, a scheduler that was there before, and a loss scaler; state_dict is torch's."""
    p = nn.Parameter(torch.ones(16 * 40))
    optimizer = getattr(torch.optim, kind)([p], lr=0.1, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    touched = {"now": None}
    attach_lazy_update(optimizer).follow(lambda: touched["now"], 16)

    def closure():
        p.grad = torch.full_like(p, 1e-3)
        return 7.0

    assert optimizer.step(closure) == 7.0
    schedule.step()

    def blocks():
        one = BlockGradient.of(p, torch.tensor([3]), torch.full((1, 16), 4.0))
        touched["now"], p.grad = {p: one}, one.grad
        return 8.0

    before = p.detach().clone()
    assert optimizer.step(closure=blocks) == 8.0
    assert (p != before).nonzero().view(-1).tolist() == list(range(48, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value, moves in ((4.0, True), (float("inf"), False)):
        one = BlockGradient.of(p, torch.tensor([5]), torch.full((1, 16), value))
        scaler.scale(torch.ones(()))
        touched["now"], p.grad = {p: one}, one.grad
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert bool((p != before).any()) == moves
        assert one.values[0, 0] == (1.0 if moves else value)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_an_optimizer_of_torchs_pays_when_it_is_told_to():
    p = [nn.Parameter(torch.zeros(3))]
    assert attach_lazy_update(torch.optim.SGD(p, lr=0.1), "later").momentum_mode == "later"


def test_what_has_no_sparse_steps_is_refused_by_name():
    p = [nn.Parameter(torch.zeros(3))]
    for optimizer, words in (
        (torch.optim.Adam(p), "Adam has no sparse steps; allowed are torch.optim.SGD, torch.optim.AdamW"),
        (torch.optim.SGD(p, lr=0.1, fused=True), "cannot go with fused=True"),
        (torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "cannot go with dampening=0.5"),
        (torch.optim.SGD(p, lr=0.1, maximize=True), "cannot go with maximize=True"),
        (torch.optim.AdamW(p, amsgrad=True), "cannot go with amsgrad=True"),
        (torch.optim.AdamW(p, differentiable=True), "cannot go with differentiable=True"),
        (torch.optim.AdamW(p, lr=torch.tensor(0.1)), "a learning rate that is a tensor"),
        (torch.optim.AdamW(p, betas=(0.9, 0.0)), r"cannot go with betas=\(0.9, 0.0\)"),
    ):
        with pytest.raises(ValueError, match=words):
            attach_lazy_update(optimizer)


@pytest.mark.parametrize("kind", [SparseSGD, SparseAdamW])
def test_fused_steps_are_refused_at_construction(kind):
    """Torch leaves unscaling to a fused step, which would not see blocks."""
    p = nn.Parameter(torch.zeros(3))
    for arguments in (([p],), ([{"params": [p], "fused": True}],)):
        fused = {} if isinstance(arguments[0][0], dict) else {"fused": True}
        with pytest.raises(ValueError, match=f"{kind.__name__} cannot go with fused=True: .* Leave fused out"):
            kind(*arguments, lr=0.1, **fused)
    optimizer = kind([p], lr=0.1, foreach=True)
    with pytest.raises(ValueError, match="fused=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "fused": True})
    with pytest.raises(ValueError, match="cannot go with fused=True"):
        attach_lazy_update(torch.optim.SGD([p], lr=0.1, fused=True))


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (SparseSGD, torch.optim.SGD, (0.1, 0.9, 0, 0.01, True)),
        (SparseAdamW, torch.optim.AdamW, (0.1, (0.8, 0.99), 1e-6, 0.1)),
    ],
)
def test_arguments_are_torchs(ours, theirs, values):
    """By name, kind and default, and by position; ``pay`` comes besides."""
    parameters = dict(inspect.signature(ours).parameters)
    pay = parameters.pop("pay")
    assert (pay.kind, pay.default) == (pay.KEYWORD_ONLY, "ahead")
    assert parameters == dict(inspect.signature(theirs).parameters)
    p = nn.Parameter(torch.ones(3))
    made, expected = ours([p], *values), theirs([p], *values)
    assert made.defaults == expected.defaults
    assert [{**group, "params": None} for group in made.param_groups] == [
        {**group, "params": None} for group in expected.param_groups
    ]


def test_pay_is_one_of_two():
    with pytest.raises(ValueError, match="pay='never' is unknown; allowed are 'ahead', 'later'"):
        SparseSGD([nn.Parameter(torch.zeros(3))], lr=0.1, pay="never")
