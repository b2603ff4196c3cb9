"""Lazy updates around an optimizer's own step: sources of gradients, flushes, and steps that are dense."""

import copy
import logging

import pytest
import torch

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseSGD
from lightning_hetero.optim.sparse import lazy_update as module
from tests.optim.sparse.pairs import Pair
from tests.optim.sparse.twins import gradients, made, same


def test_what_was_owed_is_paid_when_nothing_is_owed_any_more():
    """A weight decay that is switched off and on again: blocks of the time in between owe what was before."""
    touched = {}
    parameters, sparse, twins, dense = made("sgd decay", touched)
    for step in range(24):
        gradients(parameters, twins, touched, step, dense=step == 0)
        for optimizer in (sparse, dense):
            optimizer.param_groups[0]["weight_decay"] = (0.05, 0.0, 0.3)[step // 4 % 3]
            optimizer.step()
    sparse.sparse.flush()
    same(parameters, twins, rtol=1e-9, atol=1e-11)


def test_a_decay_that_is_switched_off_is_paid_when_saving():
    """Momentum is paid ahead, so that without decay a save would have nothing to pay."""
    found = []
    for late in (False, True):
        touched = {}
        parameters, _, twins, _ = made("momentum decay", touched)
        sparse = SparseSGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
        sparse.sparse.follow(lambda touched=touched: touched["now"], 16)
        for step in range(6):
            gradients(parameters, twins, touched, step, dense=step == 0)
            sparse.step()
        before = [p.detach().clone() for p in parameters]
        if late:
            sparse.param_groups[0]["weight_decay"] = 0.0
        sparse.state_dict()
        assert any(not torch.equal(p, was) for p, was in zip(parameters, before, strict=True)), "nothing was owed"
        found.append(parameters)
    same(*found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_debts_end(kind, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEFERRED_STEPS", 7)
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(22):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
        if step and step % 7 == 0:
            same(parameters, twins, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_who_follows_another_source_has_paid(kind):
    """As where gradients are dense from now on."""
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(5):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
    sparse.sparse.follow(None, 16)
    same(parameters, twins, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_who_loads_a_state_owes_nothing(kind):
    """As where training is taken back to a checkpoint; what later steps owed is over."""
    touched = {}
    parameters, sparse, twins, _ = made(kind, touched)
    for step in range(6):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        if step == 2:
            state, weights = copy.deepcopy(sparse.state_dict()), [p.detach().clone() for p in parameters]
    sparse.load_state_dict(state)
    for p, saved in zip(parameters, weights, strict=True):
        p.data.copy_(saved)
    sparse.sparse.flush()
    same(parameters, weights, rtol=0.0, atol=0.0)


def test_without_a_source_and_with_a_gradient_of_the_users_it_is_dense():
    touched = {}
    parameters, sparse, twins, dense = made("momentum decay", touched)
    sparse.sparse.follow(None, 16)
    for step in range(3):
        gradients(parameters, twins, touched, step, dense=True)
        sparse.step()
        dense.step()
    same(parameters, twins, rtol=0, atol=0)
    sparse.sparse.follow(lambda: touched["now"], 16)
    for step in range(3):
        gradients(parameters, twins, touched, step)
        for p, twin in zip(parameters, twins, strict=True):
            p.grad = twin.grad.clone()
        sparse.step()
        dense.step()
        same(parameters, twins, rtol=0, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_done_to_a_gradient_in_place_counts(channels_last):
    """A step stays sparse then, as on a GPU, where the host cannot see it; torch's ``mul_`` takes other memory."""
    touched = {}
    parameters, sparse, twins, dense = made("momentum decay", touched)
    if channels_last:
        for p in (parameters[0], twins[0]):
            p.data = p.data.view(4, 8, 5, 4).to(memory_format=torch.channels_last)
    for step in range(6):
        generator, touched["now"] = torch.Generator().manual_seed(step), None if step == 0 else {}
        for p, twin in zip(parameters, twins, strict=True):
            rows = torch.tensor([0, -(-p.numel() // 16) - 1]).unique()
            values = torch.randn(len(rows), 16, generator=generator, dtype=p.dtype)
            values.view(-1)[values.numel() + min(0, p.numel() - 16 * (int(rows[-1]) + 1)) :] = 0
            one = BlockGradient.of(p, rows, values)
            twin.grad = one.grad.to_dense() * 0.5
            p.grad = twin.grad.clone() if step == 0 else one.grad
            if step:
                touched["now"][p] = one
                p.grad.mul_(0.5)
                assert p.grad is one.grad
        before = parameters[0].detach().clone()
        sparse.step()
        dense.step()
        assert ((parameters[0] != before).sum() <= 32) == (step > 0)
    sparse.sparse.flush()
    same(parameters, twins, rtol=1e-9, atol=1e-11)


def test_an_option_without_a_sparse_form_is_said_once_and_steps_are_dense(caplog):
    pair = Pair("momentum")
    pair.step(dense=True)
    pair.step()
    pair.set(maximize=True)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        for _ in range(3):
            pair.step()
    pair.same(1e-9)
    said = [record.getMessage() for record in caplog.records if "no form for maximize=True" in record.getMessage()]
    assert len(said) == 1
