"""Gradients that are not finite are found whatever their type, and lines in the log become rare."""

import gc
import logging
import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, StepSkipper, all_finite, clear


def parameter(*values, dtype=torch.float32):
    p = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_value_is_found_among_all(bad, dtype):
    good = [parameter(1.0, -2.0), torch.nn.Parameter(torch.zeros(2)), parameter(3.0, dtype=torch.float64)]
    assert all_finite(good)
    assert not all_finite([*good, parameter(0.0, bad, dtype=dtype)])


def test_large_numbers_of_a_short_type_are_finite_though_their_sum_is_not_in_it():
    assert all_finite([parameter(6e4, 6e4, dtype=torch.float16)])


def test_without_gradients_there_is_nothing_that_is_not_finite():
    assert all_finite([torch.nn.Parameter(torch.zeros(2))])


def test_cleared_gradients_are_zero_and_missing_ones_stay_missing():
    bad, none = parameter(math.nan, 1.0), torch.nn.Parameter(torch.zeros(2))
    clear([bad, none])
    assert bad.grad.tolist() == [0.0, 0.0]
    assert none.grad is None


def test_lines_come_at_powers_of_two(caplog):
    dropped = DroppedSteps()
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        for step in range(10):
            dropped.add(step, "on rank 1")
    assert [record.args[0] for record in caplog.records] == [0, 1, 3, 7]
    assert dropped.count == 10
    assert "step 7 on rank 1" in caplog.messages[-1]


# steps that are skipped


class Steps:
    """An optimizer with momentum, one step old, for two parameters; steps of the first are skipped."""

    def __init__(self, sparse=False):
        self.skips, self.sparse, self.skipper = False, sparse, StepSkipper()
        self.meant, self.other = torch.nn.Parameter(torch.ones(3, 1)), torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.meant, self.other], lr=0.1, momentum=0.9)
        self.step(1.0)

    def backward(self, value):
        full = torch.full((3, 1), value)
        self.meant.grad = full.to_sparse(1) if self.sparse else full
        self.other.grad = torch.full((2,), value)
        if self.skips and self.skipper is not None:
            self.skipper.skip([self.meant])
        return value

    def step(self, value, how="plain"):
        """Step, and return by how much each parameter moved."""
        before = [p.detach().clone() for p in (self.meant, self.other)]
        if how == "plain":
            self.backward(value)
            self.optimizer.step()
        elif how == "closure":
            assert self.optimizer.step(lambda: self.backward(value)) == value
        else:
            assert self.optimizer.step(closure=lambda: self.backward(value)) == value
        after = (self.meant, self.other)
        return [float((b - a.detach()).abs().max()) for a, b in zip(after, before, strict=True)]


@pytest.mark.parametrize("how", ["plain", "closure", "keyword"])
def test_a_skipped_step_moves_nothing_and_leaves_the_momentum(how):
    steps = Steps()
    momentum = steps.optimizer.state[steps.meant]["momentum_buffer"].clone()
    steps.skips = True
    own, other = steps.step(0.0, how)
    assert own == 0.0
    assert other == pytest.approx(0.09), "a parameter whose gradient was not left out takes its step"
    assert steps.optimizer.state[steps.meant]["momentum_buffer"].equal(momentum)
    steps.skips = False
    assert steps.step(0.0, how)[0] == pytest.approx(0.09), "only that step is skipped"


@pytest.mark.parametrize("how", ["plain", "closure", "keyword"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_that_is_not_zero_is_stepped_on(how, sparse):
    """It is of an earlier step, and comes late; or of a backward pass of which we know nothing."""
    steps = Steps(sparse)
    steps.skips = True
    assert steps.step(1.0, how)[0] > 0.1
    assert steps.step(0.0, how)[0] == 0.0


def test_each_optimizer_skips_its_own_step():
    """Two optimizers step after both backward passes; each parameter remembers whether its gradient was left out."""
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.AdamW([p], weight_decay=0.1) for p in (first, second)]
    skipper = StepSkipper()
    first.grad = torch.zeros(1)
    skipper.skip([first, second])
    second.grad = torch.zeros(1)
    for optimizer in optimizers:
        optimizer.step()
    assert first.item() == 1.0
    assert second.item() < 1.0
    skipper.remove()


def test_one_late_gradient_shows_that_all_are_late():
    """A parameter whose late gradient happens to be zero steps as well, as its momentum acts."""
    both = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer, skipper = torch.optim.SGD(both, lr=0.1, momentum=0.9, weight_decay=0.1), StepSkipper()
    both[0].grad, both[1].grad = torch.ones(1), torch.zeros(1)
    skipper.skip(both)
    optimizer.step()
    assert both[1].item() < 1.0
    skipper.remove()


@pytest.mark.parametrize("end", ["removed", "forgotten"])
def test_nothing_is_skipped_any_more_once_the_skipper_has_gone(end):
    steps = Steps()
    steps.skips = True
    steps.backward(0.0)
    if end == "removed":
        steps.skipper.remove()
        steps.skipper.remove()
    else:
        steps.skipper = None
        gc.collect()
    steps.skips = False
    assert steps.step(0.0)[0] > 0.0


@pytest.mark.parametrize("how", ["plain", "closure"])
def test_a_skipper_may_go_while_an_optimizer_goes_through_its_hooks(how):
    """Garbage collection runs at any moment."""
    steps, forgotten = Steps(), Steps()
    forgotten.skipper.cycle = forgotten

    def collect(*_):
        nonlocal forgotten
        forgotten = None
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    try:
        assert steps.step(1.0, how)[0] > 0.1
    finally:
        handle.remove()
