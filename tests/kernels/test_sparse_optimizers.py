"""Sparse optimizers: settled they are torch's own, ahead they follow their rules, and all backends take equal steps."""

import copy
import inspect
import logging

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.compression import BlockGradient
from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse.optimizers import attach_lazy_update
from tests.kernels.backends import DEVICE, HOSTS, TRITON

KINDS = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 0.05}),
    "decay": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "momentum decay": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SparseSGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.1, "eps": 1e-13}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


# every backend takes the steps of torch's operations


def gradient_of(p, mask, values, block, backend):
    """The gradient of the blocks of a mask, by their numbers; or by marks, where what is not marked is never read."""
    values = values.to(p.device, p.dtype)
    if backend == "triton":
        p.grad = values.masked_fill(~mask.repeat_interleave(block)[: p.numel()].to(p.device), float("nan"))
        return BlockMarks(mask.to(p.device), p.grad)
    rows = mask.nonzero().view(-1).to(p.device)
    one = BlockGradient.of(p, rows, nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)[rows])
    p.grad = one.grad
    return one


def steps_of(kind, pay, block, backend, *, dtype=torch.float32, state=torch.float32, together=True, shapes=None):
    """Parameters and state after some steps, half of them settled, with rates that change."""
    ours, _, arguments = KINDS[kind]
    shapes = shapes or (
        ((16 * 20,), (16 * 17 + 5,), (1,), (0,)) if TRITON else ((16 * 40,), (30, 27), (3, 8, 5, 5), (1,))
    )
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
    for p in parameters:
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
    more = [nn.Parameter(torch.zeros(1_000_000))] if backend == "numba" else []  # large enough for its loops
    groups = [{"params": [*parameters[:2], *more]}, {"params": parameters[2:], "lr": 0.03, "weight_decay": 0.02}]
    groups = groups if together else [{**group, "params": [p]} for group in groups for p in group["params"]]
    optimizer, touched = ours(groups, pay=pay, **arguments), {}
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
    optimizer.step()  # dense, and in float32: it makes the state
    for p in parameters:
        p.grad, p.data = None, p.data.to(dtype)
        optimizer.state[p].update({n: v.to(state) for n, v in optimizer.state[p].items() if v is not None and v.dim()})
    optimizer.sparse.follow(lambda: touched, block)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(5 if TRITON else 8):
        for p in parameters:
            mask = torch.rand(-(-p.numel() // block), generator=generator) < (0.3, 0.0, 1.0, 0.1)[step % 4]
            values = torch.randn(p.numel(), generator=generator)
            touched[p] = gradient_of(p, mask, values, block, backend)
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * (1 + step % 3)
        optimizer.step()
        if step == 2:  # half-way, with waits kept
            optimizer.sparse.flush()
    optimizer.sparse.flush()
    states = [v for p in parameters for v in optimizer.state[p].values() if v is not None]
    return [value.detach().cpu().float() for value in (*parameters, *states)]


BACKEND = "triton" if TRITON else "numba" if len(HOSTS) > 2 else "torch"
HALF = [  # types of parameters and of their state, on a GPU
    ("momentum decay", "later", torch.bfloat16, torch.float32),
    ("momentum", "ahead", torch.float16, torch.float32),
    ("adamw", "later", torch.float16, torch.float32),
    ("adamw", "ahead", torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("block", [16] if TRITON else [8, 16, 64])
@pytest.mark.parametrize("pay", ["ahead", "later"])
@kinds
def test_every_backend_takes_the_same_steps_bit_by_bit(kind, pay, block):
    found, expected = (steps_of(kind, pay, block, backend) for backend in (BACKEND, "torch"))
    assert all(torch.isfinite(value).all() for value in found)
    for value, due in zip(found, expected, strict=True):
        assert torch.equal(value, due)


@pytest.mark.parametrize(("kind", "pay", "dtype", "state"), HALF, ids=str)
def test_steps_of_other_types_are_the_same_too(kind, pay, dtype, state):
    given = {"dtype": dtype, "state": state}
    found, expected = (steps_of(kind, pay, 16, backend, **given) for backend in (BACKEND, "torch"))
    assert all(torch.equal(value, due) for value, due in zip(found, expected, strict=True))
    exact = steps_of(kind, pay, 16, "torch")
    assert all(torch.allclose(value, due, rtol=0.1, atol=0.1) for value, due in zip(found, exact, strict=True))


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_parameters_of_one_launch_move_as_each_of_its_own_would(kind):
    shapes = ((320,), (277,), (1,), (0,), (48,), (90,))
    found, alone = (steps_of(kind, "ahead", 16, BACKEND, together=one, shapes=shapes) for one in (True, False))
    assert all(torch.equal(value, due) for value, due in zip(found, alone, strict=True))


# beside torch's dense optimizer

BLOCK = 8
SHAPES = {
    "vector": (40,),
    "tail": (29,),
    "scalar": (),
    "one": (1,),
    "empty": (0,),
    "no row": (0, 5),
    "image": (3, 4, 5, 3),
}


class Pair:
    """A sparse optimizer and torch's own, on the same parameters and gradients, in float64."""

    def __init__(self, kind, pay="later", shapes=("vector", "tail", "scalar")):
        sparse, dense, arguments = KINDS[kind]
        self.kind, self.ours, self.theirs = kind, [], []
        self.generator, self.given = torch.Generator().manual_seed(0), None
        pairs = [self.parameter(SHAPES[name]) for name in shapes]
        self.sparse = sparse([p for p, _ in pairs], pay=pay, **arguments)
        self.dense = dense([p for _, p in pairs], **arguments)
        self.sparse.sparse.follow(lambda: self.given, BLOCK)
        self.step(dense=True)

    def parameter(self, shape):
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        self.ours.append(nn.Parameter(value))
        self.theirs.append(nn.Parameter(value.clone()))
        return self.ours[-1], self.theirs[-1]

    def set(self, **values):
        for group in (*self.sparse.param_groups, *self.dense.param_groups):
            group.update({name: value for name, value in values.items() if name in group})

    def add_group(self, shape):
        one, other = self.parameter(shape)
        self.sparse.add_param_group({"params": [one]})
        self.dense.add_param_group({"params": [other]})

    def freeze(self, number, trained=False):
        for p in (self.ours[number % len(self.ours)], self.theirs[number % len(self.ours)]):
            p.requires_grad_(trained)

    def step(self, share=0.2, dense=False, scale=1.0):
        """The same gradient for both, scaled in place before the step; parameters that are frozen get none."""
        self.given = None if dense else {}
        for p, twin in zip(self.ours, self.theirs, strict=True):
            rows = -(-p.numel() // BLOCK)
            values = torch.randn(rows, BLOCK, generator=self.generator, dtype=torch.float64)
            values.view(-1)[p.numel() :] = 0
            few = (torch.rand(rows, generator=self.generator) < (1.0 if dense else share)).nonzero().view(-1)
            p.grad = twin.grad = None
            if not p.requires_grad:
                continue
            one = BlockGradient.of(p, few, values[few])
            whole = one.grad.to_dense() if one.grad.is_sparse else one.grad.clone()
            twin.grad = torch.empty_like(twin).copy_(whole).mul_(scale)
            p.grad = twin.grad.clone() if dense else one.grad
            if not dense:
                self.given[p] = one
                p.grad.mul_(scale)  # torch's `mul_` takes other memory
        self.sparse.step()
        self.dense.step()

    def moved_besides(self, before):
        """Parameters that moved outside of their touched blocks."""
        found = []
        for number, (p, was) in enumerate(zip(self.ours, before, strict=True)):
            flat, old = (t.detach().permute(0, 2, 3, 1) if t.dim() == 4 else t.detach() for t in (p, was))
            moved = nn.functional.pad((flat != old).reshape(-1), (0, -p.numel() % BLOCK)).view(-1, BLOCK).any(1)
            touched = set(self.given[p].rows.tolist()) if p in self.given else set()
            if set(moved.nonzero().view(-1).tolist()) - touched:
                found.append(number)
        return found

    def same(self, tolerance):
        """Parameters and torch's state, once nothing is owed."""
        self.sparse.sparse.flush()
        for p, twin in zip(self.ours, self.theirs, strict=True):
            torch.testing.assert_close(p.detach(), twin.detach(), rtol=tolerance, atol=tolerance)
            state, expected = self.sparse.state.get(p, {}), self.dense.state.get(twin, {})
            for name in expected:
                torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance)


def tolerance_of(kind):
    return 2e-6 if kind == "adamw" else 1e-8


@pytest.mark.parametrize("kind", ["momentum decay", "nesterov", "adamw"])
def test_under_one_cycle_it_is_exact(kind):
    """Momentum and the first beta change in each step; blocks that wait too long are paid in between."""
    pair, steps = Pair(kind), 530
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, KINDS[kind][2]["lr"], steps + 2)
        for optimizer in (pair.sparse, pair.dense)
    ]
    for _ in range(steps):
        pair.step(share=0.002)
        for schedule in schedules:
            schedule.step()
    pair.same(1e-8 if kind == "adamw" else 1e-11)


EVENTS = {
    "steps": (st.integers(1, 6), lambda pair, value: [pair.step() for _ in range(value)]),
    "clipped": (st.just(0.5), lambda pair, value: pair.step(scale=value)),
    "dense": (st.just(0), lambda pair, _: pair.step(dense=True)),
    "all blocks": (st.just(0), lambda pair, _: pair.step(share=1.0)),
    "freeze": (st.integers(0, 8), lambda pair, value: pair.freeze(value)),
    "unfreeze": (st.integers(0, 8), lambda pair, value: pair.freeze(value, trained=True)),
    "add": (st.sampled_from(list(SHAPES)), lambda pair, value: pair.add_group(SHAPES[value])),
    "save": (st.just(0), lambda pair, _: copy.deepcopy(pair.sparse.state_dict())),
    "load": (st.just(0), lambda pair, _: pair.sparse.load_state_dict(copy.deepcopy(pair.sparse.state_dict()))),
    "through torch": (st.just(0), lambda pair, _: through_torch(pair)),
    "lr": (st.sampled_from([0.01, 0.02, 0.05]), lambda pair, value: pair.set(lr=value)),
    "decay": (st.sampled_from([0.0, 0.05, 0.2]), lambda pair, value: pair.set(weight_decay=value)),
    "momentum": (
        st.sampled_from([0.0, 0.5, 0.9]),
        lambda pair, value: pair.set(momentum=value or 0.9 * (pair.kind == "nesterov")),
    ),
    "betas": (
        st.sampled_from([(0.9, 0.999), (0.85, 0.99), (0.0, 0.95)]),
        lambda pair, value: pair.set(betas=value),
    ),
}


def through_torch(pair):
    pair.dense.load_state_dict(copy.deepcopy(pair.sparse.state_dict()))
    pair.sparse.load_state_dict(copy.deepcopy(pair.dense.state_dict()))


@kinds
@pytest.mark.parametrize("pay", ["later", "ahead"])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4),
    events=st.lists(
        st.one_of([st.tuples(st.just(name), values) for name, (values, _) in EVENTS.items()]), min_size=4, max_size=14
    ),
)
def test_whatever_happens_only_touched_blocks_move_and_paid_later_it_is_the_dense_optimizer(pay, kind, shapes, events):
    """Between two settlements nothing else is written; what blocks owe is what the dense optimizer did meanwhile."""
    pair = Pair(kind, pay, shapes=tuple(shapes))
    for event, value in events:
        EVENTS[event][1](pair, value)
        pair.step()  # new parameters get their state, those that were frozen now are paid
        before = [p.detach().clone() for p in pair.ours]
        pair.step()
        assert all(torch.isfinite(p).all() for p in pair.ours)
        assert pair.moved_besides(before) == []
    if pay == "later":
        pair.same(tolerance_of(kind))


# paid ahead, by the rules of design: every element in every step

AHEAD = {
    "momentum": (SparseSGD, {"lr": 0.02, "momentum": 0.9}),
    "decay": (SparseSGD, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}),
    "nesterov": (SparseSGD, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (SparseAdamW, {"lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-13}),
}


class Rules:
    """One parameter in blocks of 4. In a sparse step nothing is put off: untouched blocks decay at once."""

    def __init__(self, start):
        self.p = start.clone().view(-1, 4)
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
        adamw = ("lr", "betas", "weight_decay", "eps")
        names = adamw if "betas" in group else ("lr", "momentum", "weight_decay", "nesterov")
        (self.adamw if "betas" in group else self.sgd)(rows, g, *(group[name] for name in names))


def rates_of(group, arguments, done):
    """Rates in a cycle, and from two thirds on another decay."""
    group["lr"] = arguments["lr"] * (1 - done)
    if "momentum" in group:
        group["momentum"] = arguments["momentum"] * (0.8 + 0.2 * done)
    if 3 * done >= 2:
        group["weight_decay"] = 0.03
    return group


def step_of(p, rule, group, given, rng, share):
    """Give the optimizer a gradient of some blocks, or of all of them, and the rules their step."""
    values = torch.from_numpy(rng.standard_normal((len(rule.p), 4)))
    rows = np.flatnonzero(rng.random(len(values)) < share)
    p.grad = values.reshape(-1)
    if given is not None:
        given[p] = BlockGradient.of(p, torch.from_numpy(rows), values[rows])
        p.grad = given[p].grad
    rule.step(None if given is None else set(rows.tolist()), values, group)


@pytest.mark.parametrize("kind", AHEAD)
def test_paid_ahead_every_element_is_where_the_rules_take_it(kind, seed):
    """Through a cycle of rates and momentum, dense steps, saves, another decay, and a layer that sits out."""
    rng, (make, arguments), given = np.random.default_rng(seed), AHEAD[kind], {}
    parameters = [nn.Parameter(torch.from_numpy(rng.standard_normal(4 * rows))) for rows in (9, 4, 1)]
    rules, optimizer = [Rules(p.detach()) for p in parameters], make(parameters, **arguments)
    optimizer.sparse.follow(lambda: given["now"], 4)
    for step in range(90):
        group = rates_of(optimizer.param_groups[0], arguments, step / 90)
        given["now"] = None if step in (0, 1, 30) else {}
        for number, (p, rule) in enumerate(zip(parameters, rules, strict=True)):
            frozen, p.grad = number == 1 and 40 < step < 50, None
            if given["now"] is None or frozen:
                rule.sit_out()
            if not frozen:
                step_of(p, rule, group, given["now"], rng, (0.1, 0.4, 0.7)[number])
            rule.sparse_steps += 1
        optimizer.step()
        if step % 20 == 15:
            optimizer.state_dict()
    optimizer.sparse.flush()
    for p, rule in zip(parameters, rules, strict=True):
        pairs = {"momentum_buffer": rule.b, "exp_avg": rule.b, "exp_avg_sq": rule.v}
        state = optimizer.state[p]
        for value, due in [(p.detach(), rule.p), *((state[name], due) for name, due in pairs.items() if name in state)]:
            torch.testing.assert_close(value.view(-1, 4), due, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_sums_without_end_are_paid_later(kind):
    pair = Pair(kind, pay="ahead")
    pair.set(momentum=1.0, betas=(0.9, 0.3))
    for _ in range(5):
        pair.step()
    pair.same(tolerance_of(kind))


# as users meet them


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (SparseSGD, torch.optim.SGD, (0.1, 0.9, 0, 0.01, True)),
        (SparseAdamW, torch.optim.AdamW, (0.1, (0.8, 0.99), 1e-6, 0.1)),
    ],
)
def test_arguments_are_torchs_and_fused_steps_are_refused(ours, theirs, values):
    """By name, kind, default and position; ``pay`` comes besides. A fused step would not see blocks."""
    parameters = dict(inspect.signature(ours).parameters)
    assert parameters.pop("pay").default == "ahead"
    assert parameters == dict(inspect.signature(theirs).parameters)
    p = nn.Parameter(torch.ones(3))
    made, expected = ours([p], *values), theirs([p], *values)
    assert [{**g, "params": 0} for g in made.param_groups] == [{**g, "params": 0} for g in expected.param_groups]
    for wrong, says in (({"pay": "never"}, "pay='never'"), ({"fused": True}, "fused=True")):
        with pytest.raises(ValueError, match=says):
            ours([p], lr=0.1, **wrong)
    with pytest.raises(ValueError, match="fused=True"):
        made.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "fused": True})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.Adam(p), "Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), "fused=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), "learning rate"),
        (lambda p: torch.optim.AdamW(p, betas=(0.9, 0.0)), "betas="),
    ],
)
def test_what_has_no_sparse_steps_is_refused_by_name(make, says):
    with pytest.raises(ValueError, match=says):
        attach_lazy_update(make([nn.Parameter(torch.zeros(3))]))


def test_an_option_without_a_sparse_form_is_said_once_and_steps_are_dense(caplog):
    pair = Pair("momentum")
    pair.step()
    pair.set(maximize=True)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        for _ in range(3):
            pair.step()
    pair.same(1e-9)
    assert ["maximize=True" in record.getMessage() for record in caplog.records] == [True]
