"""Learning rates during one local step: scaled for the optimizer, as they are given for the user's code."""

import pytest
import torch
from torch import nn

from lightning_hetero.strategies._lightning.elastic.rates import scaled_rates


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.fixture
def optimizer():
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.4)])


def test_the_optimizer_sees_scaled_rates_and_the_closure_those_that_are_given(optimizer):
    seen = []
    with scaled_rates(optimizer, 0.5, lambda: seen.append(rates(optimizer)) or "loss") as closure:
        assert rates(optimizer) == [0.05, 0.2]
        for _ in range(2):
            assert closure() == "loss"
            assert rates(optimizer) == [0.05, 0.2]
    assert seen == [[0.1, 0.4]] * 2
    assert rates(optimizer) == [0.1, 0.4]


def test_a_rate_that_the_closure_sets_is_scaled_and_stays(optimizer):
    def sets():
        optimizer.param_groups[0]["lr"] = 1.0

    with scaled_rates(optimizer, 0.5, sets) as closure:
        closure()
        assert rates(optimizer) == [0.5, 0.2]
    assert rates(optimizer) == [1.0, 0.4]


def test_rates_are_as_they_were_behind_an_error(optimizer):
    def fails():
        optimizer.param_groups[1]["lr"] = 2.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"), scaled_rates(optimizer, 0.5, fails) as closure:
        closure()
    assert rates(optimizer) == [0.1, 2.0]
