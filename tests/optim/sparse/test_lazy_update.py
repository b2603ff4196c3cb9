"""Momentum that is paid ahead, against its rules applied to every element in every step, as the docs have them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD

BLOCK = 4
KINDS = {
    "momentum": (SparseSGD, {"lr": 0.02, "momentum": 0.9}),
    "decay": (SparseSGD, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}),
    "nesterov": (SparseSGD, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (SparseAdamW, {"lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-13}),
}


class Rules:
    """One parameter. In a sparse step nothing is put off: untouched blocks decay at once."""

    def __init__(self, start):
        self.p = start.clone().view(-1, BLOCK)
        self.b, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.steps = self.sparse_steps = 0
        self.sit_out()

    def sit_out(self):
        """What is known of waits is forgotten, as in a dense step."""
        self.touched, self.wait = [None] * len(self.p), [None] * len(self.p)

    def sgd(self, rows, g, lr, momentum, weight_decay, nesterov):
        ahead = lr * momentum / (1 - momentum) * (momentum if nesterov else 1)
        for row in range(len(self.p)):
            if rows is not None and row not in rows:
                self.p[row] *= 1 - lr * weight_decay / (1 - momentum)
                continue
            gradient = g[row] + weight_decay * self.p[row]
            self.b[row] = momentum * self.b[row] + gradient
            self.p[row] -= lr * (gradient + momentum * self.b[row] if nesterov else self.b[row])
            if rows is not None:
                kept = self.kept(row, momentum)
                self.p[row] -= (1 - kept) * ahead * self.b[row]
                self.b[row] *= kept

    def kept(self, row, momentum):
        """``m^2n`` with the mean wait ``n``, of which the newest is a quarter, in 1/256 of a step and whole steps."""
        before, self.touched[row] = self.touched[row], self.sparse_steps
        if before is None:
            return 0.0
        newest = 256 * (self.sparse_steps - before - 1)
        self.wait[row] = newest if self.wait[row] is None else self.wait[row] + (newest - self.wait[row] >> 2)
        return momentum ** (2 * (self.wait[row] >> 8))

    def adamw(self, rows, g, lr, betas, weight_decay, eps):
        touched = torch.tensor([rows is None or row in rows for row in range(len(self.p))])[:, None]
        g = torch.where(touched, g, 0.0)
        self.p *= 1 - lr * weight_decay
        self.b, self.v = betas[0] * self.b + (1 - betas[0]) * g, betas[1] * self.v + (1 - betas[1]) * g * g
        move = lr * self.b / (1 - betas[0] ** self.steps) / ((self.v / (1 - betas[1] ** self.steps)).sqrt() + eps)
        if rows is None:
            self.p -= move
        else:
            self.p -= torch.where(touched, move / (1 - betas[0] / betas[1] ** 0.5), move)
            self.b = torch.where(touched, 0.0, self.b)

    def step(self, rows, g, group):
        """A step with these blocks touched, ``None`` for a dense one."""
        self.steps += 1
        rule = self.adamw if "betas" in group else self.sgd
        names = (
            ("lr", "betas", "weight_decay", "eps")
            if "betas" in group
            else ("lr", "momentum", "weight_decay", "nesterov")
        )
        rule(rows, g, *(group[name] for name in names))


def resumed(optimizer, parameters, given):
    """Another optimizer that goes on from what a checkpoint holds of this one."""
    state, notes = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.sparse.state_dict())
    parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = type(optimizer)(parameters, lr=1.0)
    other.sparse.follow(lambda: given["now"], BLOCK)
    other.load_state_dict(state)
    other.sparse.load_state_dict(notes)
    return other, parameters


def set_rates(optimizer, settings, step, steps):
    """Learning rate and momentum of this step, and from two thirds on another decay."""
    rate = 1 - step / steps
    for group in optimizer.param_groups:
        group["lr"] = settings["lr"] * rate
        if "momentum" in group:
            group["momentum"] = settings["momentum"] * (1 - 0.2 * rate)
        if 3 * step >= 2 * steps:
            group["weight_decay"] = 0.03
    return optimizer.param_groups[0]


def take_step(number, p, twin, given, rng, group):
    """Give the optimizer a gradient of some blocks, fewest of the first parameter, and the twin its step."""
    values = torch.from_numpy(rng.standard_normal((len(twin.p), BLOCK)))
    rows = np.flatnonzero(rng.random(len(values)) < (0.1, 0.4, 0.7)[number])
    if given is None:
        p.grad, touched = values.reshape(-1), None
    else:
        given[p], touched = BlockGradient.of(p, torch.from_numpy(rows), values[rows]), set(rows.tolist())
        p.grad = given[p].grad
    twin.step(touched, values, group)


def same(optimizer, parameters, twins):
    for p, twin in zip(parameters, twins, strict=True):
        state = optimizer.state[p]
        pairs = {"momentum_buffer": twin.b, "exp_avg": twin.b, "exp_avg_sq": twin.v}
        for ours, due in [(p.detach(), twin.p), *((state[name], due) for name, due in pairs.items() if name in state)]:
            torch.testing.assert_close(ours.view(-1, BLOCK), due, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_paid_ahead_every_element_is_where_the_rules_take_it(kind, seed):
    """Through a cycle of rates and momentum, dense steps, saves, resumes, another decay, and a layer that sits out."""
    rng, (make, settings) = np.random.default_rng(seed), KINDS[kind]
    parameters = [nn.Parameter(torch.from_numpy(rng.standard_normal(BLOCK * rows))) for rows in (9, 4, 1)]
    twins, given, steps = [Rules(p.detach()) for p in parameters], {}, 90
    optimizer = make(parameters, **settings)
    optimizer.sparse.follow(lambda: given["now"], BLOCK)
    for step in range(steps):
        group, dense = set_rates(optimizer, settings, step, steps), step in (0, 1, 30)
        given["now"] = None if dense else {}
        for number, (p, twin) in enumerate(zip(parameters, twins, strict=True)):
            frozen = number == 1 and 40 < step < 50
            p.grad = None
            if dense or frozen:
                twin.sit_out()
            if not frozen:
                take_step(number, p, twin, given["now"], rng, group)
            twin.sparse_steps += 1
        optimizer.step()
        if step % 20 == 15:
            optimizer.state_dict()
        if step % 30 == 25:
            optimizer, parameters = resumed(optimizer, parameters, given)
    optimizer.sparse.flush()
    same(optimizer, parameters, twins)
