"""Rules of both optimizers: momentum ahead, against the rules applied to every element in every step."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse.sgd import SGDRule
from tests.optim.sparse import twins

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


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SparseSGD, torch.optim.SGD, {"momentum": 1.0}),
        (SparseAdamW, torch.optim.AdamW, {"betas": (0.9, 0.3), "eps": 1e-12}),
    ],
    ids=["sgd", "adamw"],
)
def test_momentum_whose_sum_has_no_end_is_paid_later(ours, theirs, settings):
    p, twin = (nn.Parameter(torch.ones(48, dtype=torch.float64)) for _ in range(2))
    sparse, dense, given = ours([p], lr=0.1, **settings), theirs([twin], lr=0.1, **settings), {}
    for step in range(6):
        rows = torch.tensor([0, 1] if step % 2 else [2])
        one = BlockGradient.of(p, rows, torch.ones(len(rows), 16, dtype=torch.float64))
        p.grad, twin.grad = torch.ones_like(p), torch.ones_like(p)
        if step:
            p.grad, twin.grad, given[p] = one.grad, one.grad.to_dense(), one
        sparse.step()
        dense.step()
        if step == 0:
            sparse.sparse.follow(lambda: given, 16)
    sparse.sparse.flush()
    twins.same([p], [twin], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw"])
def test_paid_ahead_a_block_is_at_once_where_the_dense_optimizer_takes_it(kind):
    """One touch, then nothing: the dense optimizer gets there after hundreds of steps without a gradient."""
    ours, theirs, settings = twins.KINDS[kind]
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
    given = {}
    for parameter in (p, twin):
        one = BlockGradient.of(parameter, torch.tensor([2]), torch.linspace(-2, 2, 16, dtype=torch.float64)[None])
        parameter.grad = one.grad if parameter is p else one.grad.to_dense()
        given.setdefault(p, one)
    sparse.sparse.follow(lambda: given, 16)
    sparse.step()
    dense.step()
    twin.grad.zero_()
    for _ in range(400):
        dense.step()
    torch.testing.assert_close(p.detach()[32:48], twin.detach()[32:48], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("waits", [(0,), (2,), (7,), (2, 2, 5, 5, 0)])
@pytest.mark.parametrize("times", [1, SGDRule.intervals_ahead])
@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_momentum_is_paid_ahead_for_twice_the_mean_wait_and_the_rest_is_kept(kind, times, waits, monkeypatch):
    """For once that wait, and a wait that stays, it would be the dense optimizer at each touch; no momentum is lost."""
    monkeypatch.setattr(SGDRule, "intervals_ahead", times)
    ours, theirs, settings = twins.KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}
    lr, m = settings["lr"], settings["momentum"]
    p, twin = (nn.Parameter(torch.zeros(16 * 8, dtype=torch.float64)) for _ in range(2))
    sparse, dense = ours([p], **settings), theirs([twin], **settings)
    for parameter, optimizer in ((p, sparse), (twin, dense)):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    given, touches = {}, [waits[0], *(waits * 4)[: max(4, len(waits))]]
    sparse.sparse.follow(lambda: given, 16)
    for number, wait in enumerate(touches):
        before, factor = sparse.state[p]["momentum_buffer"][80:96].clone(), m ** (times * touches[number - 1])
        for step in range(wait + 1):
            rows = torch.tensor([5] if step == 0 else [], dtype=torch.int64)
            values = (number + 1) * torch.linspace(-2, 2, 16, dtype=torch.float64).expand(len(rows), 16).contiguous()
            given[p] = BlockGradient.of(p, rows, values)
            p.grad, twin.grad = given[p].grad, given[p].grad.to_dense()
            sparse.step()
            dense.step()
        if number == 0:  # its wait was not known, and nothing was left
            assert not sparse.state[p]["momentum_buffer"].any()
            twin.data.copy_(p.data)
            dense.state[twin]["momentum_buffer"].zero_()
        rest, left = (state[q]["momentum_buffer"][80:96] for state, q in ((sparse.state, p), (dense.state, twin)))
        if len(set(waits)) == 1 and number:
            whole_of_it = m * before + (number + 1) * torch.linspace(-2, 2, 16, dtype=torch.float64)
            torch.testing.assert_close(rest, factor * whole_of_it)
        if len(set(waits)) == 1 and times * wait == wait:
            torch.testing.assert_close(rest, left)
            torch.testing.assert_close(p.detach()[80:96], twin.detach()[80:96])
        whole = lr * m / (1 - m) * (m if kind == "nesterov" else 1.0)
        torch.testing.assert_close(p.detach()[80:96] - whole * rest, twin.detach()[80:96] - whole * left)
    assert p.detach().any()
