"""The factor on the learning rate: the step takes it, nothing else ever sees it."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from lightning_hetero.compression import BlockGradient
from lightning_hetero.optim import LearningRateGain, LearningRateMultiplier, SparseAdamW, SparseSGD


def weights(*values):
    return [nn.Parameter(torch.tensor([float(v)])) for v in values]


def sgd(*values, **arguments):
    return torch.optim.SGD(weights(*values or (0.0,)), **{"lr": 0.1, **arguments})


def step(optimizer, gradient=1.0, **kwargs):
    """Step with these gradients; how far each weight went."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.item() for p in parameters]
    for p in parameters:
        p.grad = torch.full_like(p, gradient)
    optimizer.step(**kwargs)
    return [a - p.item() for a, p in zip(before, parameters, strict=True)]


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),  # goes on from group["lr"]
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10, cycle_momentum=False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_takes_the_factor_of_now_on_the_scheduled_rate(schedule):
    plain, scaled = sgd(momentum=0.0), sgd(momentum=0.0)
    schedules = [SCHEDULES[schedule](o) for o in (plain, scaled)]
    factors = (3.0, 1.0, 0.5, 2.0, 1.0, 4.0)
    now = iter(f for f in factors for _ in range(2))  # asked for before a step and after it
    gain = LearningRateMultiplier([scaled], lambda: next(now))
    for factor in factors:
        assert step(scaled) == pytest.approx([factor * rates(plain)[0]], rel=1e-5)
        step(plain)
        for s in schedules:
            s.step()
        assert rates(scaled) == rates(plain)
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert gain.steps == sum(factors)


def test_every_group_of_every_optimizer_and_groups_that_are_added():
    (a, b), (c,), (d,) = weights(0.0, 0.0), weights(0.0), weights(0.0)
    first = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}])
    second = torch.optim.SGD([c], lr=1.0)
    gain = LearningRateMultiplier([first, second], lambda: 2.0)
    assert LearningRateGain is LearningRateMultiplier, "its former name"
    assert step(first) == pytest.approx([0.2, 0.02])
    assert step(second) == pytest.approx([2.0])
    assert gain.steps == 2.0, "counted by the steps of the first one"
    first.add_param_group({"params": [d], "lr": 0.5})
    assert step(first) == pytest.approx([0.2, 0.02, 1.0])
    assert (rates(first), rates(second)) == ([0.1, 0.01, 0.5], [1.0])


def test_a_closure_sees_the_scheduled_rate_and_may_set_another():
    """Lightning runs ``training_step`` in it, with whatever that does: logs the rate, steps a scheduler."""
    optimizer, seen = sgd(), []
    (parameter,) = optimizer.param_groups[0]["params"]
    LearningRateMultiplier([optimizer], lambda: 2.0)

    def closure():
        seen.append(rates(optimizer)[0])
        optimizer.param_groups[0]["lr"] = 0.5
        parameter.grad = torch.ones(1)
        return 7.0

    assert optimizer.step(closure) == optimizer.step(closure=closure) == 7.0
    assert (seen, rates(optimizer)) == ([0.1, 0.5], [0.5])
    assert parameter.item() == pytest.approx(-2.0 * (0.5 + 0.5))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_a_rate_that_is_a_tensor_stays_itself(cls):
    rate = torch.tensor(0.1)
    optimizer = cls(weights(0.0), lr=rate, foreach=False)
    LearningRateMultiplier([optimizer], lambda: 2.0)
    assert step(optimizer) == pytest.approx([0.2], rel=1e-5)
    assert rates(optimizer)[0] is rate
    assert rate.item() == pytest.approx(0.1)


def test_steps_that_a_scaler_skips_do_not_count():
    optimizer, scaler = sgd(), torch.amp.GradScaler("cpu", init_scale=4.0)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter * factor).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert rates(optimizer) == [0.1]
    assert parameter.item() == pytest.approx(-0.2)
    assert gain.steps == 2.0


class Fails(torch.optim.SGD):
    """Its step raises inside, so that its second hook is not called."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.isnan():
            raise ArithmeticError
        return super().step(closure)


def test_steps_that_fail_take_the_factor_once():
    optimizer = Fails(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                step(optimizer, gradient=math.nan)
        assert step(optimizer) == pytest.approx([0.2])
        assert rates(optimizer) == [0.1]
    with pytest.raises(ArithmeticError):
        step(optimizer, gradient=math.nan)
    gain.remove()
    assert rates(optimizer) == [0.1]


def test_checkpoints_and_copies_of_the_optimizer_are_without_a_trace():
    plain, scaled = sgd(momentum=0.9), sgd(momentum=0.9)
    LearningRateMultiplier([scaled], lambda: 2.0)
    for optimizer in (plain, scaled):
        step(optimizer)
    state = copy.deepcopy(scaled.state_dict())
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    assert set(state) == set(plain.state_dict())
    for other in (pickle.loads(pickle.dumps(scaled)), copy.deepcopy(scaled)):
        assert step(other) == pytest.approx([0.1 * 1.9])
    scaled.load_state_dict(state)  # a later load keeps the factor
    assert step(scaled) == pytest.approx([0.2 * 1.9])


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        (SparseSGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (SparseAdamW, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-12}),
    ],
)
def test_sparse_steps_have_the_factor_and_closures_do_not(ours, theirs, arguments):
    p, twin = (nn.Parameter(torch.ones(64, dtype=torch.float64)) for _ in range(2))
    sparse, dense = ours([p], lr=0.01, pay="later", **arguments), theirs([twin], lr=0.02, **arguments)
    given, seen = {}, []
    sparse.sparse.follow(lambda: given or None, 16)
    LearningRateMultiplier([sparse], lambda: 2.0)
    for number in range(8):
        one = BlockGradient.of(p, torch.tensor([number % 4]), torch.ones(1, 16, dtype=torch.float64))
        p.grad, twin.grad = (one.grad if number else one.grad.to_dense()), one.grad.to_dense()
        given.update({p: one} if number else {})
        sparse.step(lambda: seen.append(rates(sparse)) or 0.0)
        dense.step()
    sparse.state_dict()  # pays what is owed
    torch.testing.assert_close(p, twin, rtol=1e-8, atol=1e-10)
    assert seen == [[0.01]] * 8
