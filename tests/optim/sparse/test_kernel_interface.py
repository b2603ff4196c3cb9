"""History of a block in one number: its last touch, and the mean of its intervals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.optim.sparse.kernel_interface import (
    FRACTION_BITS,
    INTERVAL_SHIFT,
    LAST_TOUCH_MASK,
    NEWEST_SHIFT,
    KernelStep,
    mean_intervals,
    whole_intervals,
)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_the_newest_interval_counts_for_a_quarter(skipped):
    """Against the same in floats: each update rounds down to a 256th of a step."""
    history, step, mean = torch.zeros(1, dtype=torch.int64), 0, None
    for number, steps in enumerate(skipped):
        step += steps
        interval = mean_intervals(history, step)
        if number == 0:
            assert interval.item() == 0, "nothing is known at the first touch"
        else:
            mean = steps if mean is None else mean + (steps - mean) / 2**NEWEST_SHIFT
            assert (interval.item() - 1) / 2**FRACTION_BITS == pytest.approx(mean, abs=4 / 2**FRACTION_BITS)
            assert whole_intervals(interval).item() == (interval.item() - 1) // 2**FRACTION_BITS
        history = (interval << INTERVAL_SHIFT) + step + 1
        assert (history & LAST_TOUCH_MASK).item() == step + 1
        step += 1


class Numbers(KernelStep):
    """Keeps what a kernel would be given."""

    def _sgd(self, tensors, rates, *, nesterov, ahead):
        tensors.append((rates, nesterov, ahead))

    def _adamw(self, tensors, rates, *, ahead):
        tensors.append((rates, ahead))


def test_kernels_get_the_numbers_of_a_step():
    given, group = [], {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "nesterov": 1}
    Numbers(16, 0).sgd(given, group, remaining=None)
    Numbers(16, 0).sgd(given, group, remaining=0.25)
    group = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.75, 0.5), "eps": 1e-8}
    Numbers(16, 0).adamw(given, group, number=2, ahead=3.0, deferred_eps=1e-9)
    sgd, ahead, adamw = given
    assert sgd == ((0.1, 0.5, 0.9, 0.0), True, False)
    assert ahead == ((0.1, 0.5, 0.9, 0.25), True, True)
    due = (0.95, 0.25, 0.5, 0.5, 0.75**-0.5, -0.3 / (1 - 0.5625), 1e-8, 1e-9)
    assert adamw[0] == pytest.approx(due)
    assert adamw[1] is True
