"""The factor on the learning rate: the step takes it, nothing else ever sees it."""

import copy
import io
import pickle

import pytest
import torch

from lightning_hetero.optim import LearningRateGain, LearningRateMultiplier
from tests.optim.sparse.twins import gradients, made, same


def weights(*values):
    return [torch.nn.Parameter(torch.tensor([float(v)])) for v in values]


def step(optimizer, *gradients, **kwargs):
    """Step with these gradients, by default 1; how far each weight went."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.item() for p in parameters]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, gradients[i] if gradients else 1.0)
    optimizer.step(**kwargs)
    return [a - p.item() for a, p in zip(before, parameters, strict=True)]


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_the_step_takes_the_factor(factor):
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    LearningRateMultiplier([optimizer], lambda: factor)
    assert step(optimizer) == pytest.approx([0.1 * factor])
    assert rates(optimizer) == [0.1]


def test_the_factor_is_asked_for_at_every_step():
    factor = {"now": 1.0}
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: factor["now"])
    for now in (1.0, 2.0, 0.5, 1.0):
        factor["now"] = now
        assert step(optimizer) == pytest.approx([0.1 * now])
    assert gain.steps == 4.5


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),  # goes on from group["lr"]
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    ],
    ids=["lambda", "exponential", "cosine", "one-cycle", "warm-up"],
)
def test_schedules_are_multiplied_not_replaced(schedule):
    plain, scaled = (torch.optim.SGD(weights(0.0), lr=0.1, momentum=0.5) for _ in range(2))
    schedules = [schedule(o) for o in (plain, scaled)]
    gain = LearningRateMultiplier([scaled], lambda: 3.0)
    used = []
    scaled.register_step_pre_hook(lambda o, *_: used.append(rates(o)[0]))
    for _ in range(6):
        expected = 3.0 * rates(plain)[0]
        step(plain)
        step(scaled)
        assert used[-1] == pytest.approx(expected)
        for s in schedules:
            s.step()
        assert rates(scaled) == rates(plain)
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert gain.steps == 18


def test_every_group_of_every_optimizer():
    (a, b), (c,) = weights(0.0, 0.0), weights(0.0)
    first = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}])
    second = torch.optim.SGD([c], lr=1.0)
    gain = LearningRateMultiplier([first, second], lambda: 2.0)
    assert step(first) == pytest.approx([0.2, 0.02])
    assert step(second) == pytest.approx([2.0])
    assert (rates(first), rates(second)) == ([0.1, 0.01], [1.0])
    assert gain.steps == 2.0  # counted by the steps of the first one
    (d,) = weights(0.0)
    first.add_param_group({"params": [d], "lr": 0.5})
    assert step(first) == pytest.approx([0.2, 0.02, 1.0])
    assert rates(first) == [0.1, 0.01, 0.5]


def test_closures():
    parameter = weights(0.0)
    optimizer = torch.optim.SGD(parameter, lr=0.1)
    LearningRateMultiplier([optimizer], lambda: 2.0)

    def closure():
        parameter[0].grad = torch.full((1,), 3.0)
        return torch.tensor(7.0)

    assert step(optimizer, 1.0, closure=closure) == pytest.approx([0.6])
    assert rates(optimizer) == [0.1]


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_sees_the_scheduled_rate_and_may_set_another(keyword):
    """Lightning runs ``training_step`` in it, with whatever that does: logs the rate, steps a scheduler."""
    parameter = weights(0.0)
    optimizer = torch.optim.SGD(parameter, lr=0.1)
    LearningRateMultiplier([optimizer], lambda: 2.0)
    seen = []

    def closure():
        seen.append(rates(optimizer)[0])
        optimizer.param_groups[0]["lr"] = 0.5
        parameter[0].grad = torch.ones(1)

    optimizer.step(**{"closure": closure}) if keyword else optimizer.step(closure)
    assert (seen, rates(optimizer)) == ([0.1], [0.5])
    assert parameter[0].item() == pytest.approx(-2.0 * 0.5)


def test_several_evaluations_of_a_closure_take_the_factor_once():
    parameter = weights(1.0)
    optimizer = torch.optim.LBFGS(parameter, lr=0.25, max_iter=3)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    plain = weights(1.0)
    reference = torch.optim.LBFGS(plain, lr=0.5, max_iter=3)
    for p, o in ((parameter, optimizer), (plain, reference)):

        def closure(p=p, o=o):
            o.zero_grad()
            loss = (p[0] ** 4).sum()
            loss.backward()
            return loss

        o.step(closure)
    assert parameter[0].item() == plain[0].item()
    assert (rates(optimizer), gain.steps) == ([0.25], 2.0)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_tensor_learning_rate(cls):
    rate = torch.tensor(0.1)
    optimizer = cls(weights(0.0), lr=rate, foreach=False)
    LearningRateMultiplier([optimizer], lambda: 2.0)
    assert step(optimizer) == pytest.approx([0.2], rel=1e-5)
    assert rates(optimizer)[0] is rate
    assert rate.item() == pytest.approx(0.1)


def test_steps_that_a_scaler_skips_do_not_count():
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter = optimizer.param_groups[0]["params"][0]
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter * factor).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert rates(optimizer) == [0.1]
    assert parameter.item() == pytest.approx(-0.2)
    assert gain.steps == 2.0


class BrokenError(Exception):
    pass


def test_a_step_that_fails_leaves_the_scheduled_rate():
    """A closure raises, as ``training_step`` may: a checkpoint of the exception must not have the factor in it."""
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)

    def closure():
        raise BrokenError

    for _ in range(3):
        with pytest.raises(BrokenError):
            optimizer.step(closure)
    assert step(optimizer) == pytest.approx([0.2])
    assert rates(optimizer) == [0.1]
    with pytest.raises(BrokenError):
        optimizer.step(closure)
    gain.remove()
    assert rates(optimizer) == [0.1]
    assert step(optimizer) == pytest.approx([0.1])


def test_a_step_that_fails_inside_the_optimizer_takes_the_factor_once():
    """Its second hook is not called."""

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].grad.isnan():
                raise BrokenError
            return super().step(closure)

    optimizer = Fails(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    for _ in range(2):
        with pytest.raises(BrokenError):
            step(optimizer, float("nan"))
    assert step(optimizer) == pytest.approx([0.2])
    assert rates(optimizer) == [0.1]
    with pytest.raises(BrokenError):
        step(optimizer, float("nan"))
    gain.remove()
    assert rates(optimizer) == [0.1]


def test_remove():
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    gain = LearningRateMultiplier([optimizer], lambda: 2.0)
    step(optimizer)
    gain.remove()
    gain.remove()
    assert step(optimizer) == pytest.approx([0.1])
    assert gain.steps == 2.0


def test_two_that_follow_each_other_do_not_add_up():
    optimizer = torch.optim.SGD(weights(0.0), lr=0.1)
    LearningRateMultiplier([optimizer], lambda: 2.0).remove()
    LearningRateMultiplier([optimizer], lambda: 3.0)
    assert step(optimizer) == pytest.approx([0.3])


def test_checkpoint_and_copies_of_the_optimizer_are_without_a_trace():
    plain, scaled = (torch.optim.SGD(weights(0.0), lr=0.1, momentum=0.9) for _ in range(2))
    gain = LearningRateMultiplier([scaled], lambda: 2.0)
    for optimizer in (plain, scaled):
        step(optimizer)
    assert scaled.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    assert set(scaled.state_dict()) == set(plain.state_dict())
    buffer = io.BytesIO()
    torch.save(scaled.state_dict(), buffer)
    for other in (pickle.loads(pickle.dumps(scaled)), copy.deepcopy(scaled)):
        assert rates(other) == [0.1]
        assert step(other) == pytest.approx([0.1 * 1.9])
    assert gain.steps == 2.0
    buffer.seek(0)
    fresh = torch.optim.SGD(weights(0.0), lr=0.7, momentum=0.9)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert step(fresh) == pytest.approx([0.1 * 1.9])
    scaled.load_state_dict(scaled.state_dict())  # a later load keeps the factor
    assert step(scaled) == pytest.approx([0.2 * 1.9])


@pytest.mark.parametrize("kind", ["sgd decay", "momentum decay", "adamw"])
def test_sparse_steps_have_the_factor(kind):
    """They follow the user's closure, which sees the scheduled rate."""
    touched, seen = {}, []
    parameters, sparse, twins, dense = made(kind, touched)
    LearningRateMultiplier([sparse], lambda: 2.0)
    for group in dense.param_groups:
        group["lr"] *= 2.0
    for number in range(12):
        gradients(parameters, twins, touched, number, dense=number == 7)
        sparse.step(lambda: seen.append(rates(sparse)) or 0.0)
        dense.step()
    sparse.state_dict()  # pays what is owed
    same(parameters, twins, rtol=1e-9, atol=1e-11)
    assert seen == [[group["lr"] / 2.0 for group in dense.param_groups]] * 12


def test_the_earlier_name_goes_on():
    assert LearningRateGain is LearningRateMultiplier
