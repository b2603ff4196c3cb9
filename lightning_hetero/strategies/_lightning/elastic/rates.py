"""Learning rates of one local step: the user's, times the factor of this rank's batch size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["scaled_rates"]


@contextmanager
def scaled_rates(
    optimizer: torch.optim.Optimizer, factor: float, closure: Callable[[], Any]
) -> Iterator[Callable[[], Any]]:
    """Multiply the learning rates inside the context; yield a closure that sees the unscaled ones.

    The closure runs the user's ``training_step``; a learning rate that it sets is scaled as well, and stays set.
    """
    given = _scale(optimizer, factor)

    def at_the_given_rates() -> Any:
        nonlocal given
        _set(optimizer, given)
        try:
            return closure()
        finally:
            given = _scale(optimizer, factor)

    try:
        yield at_the_given_rates
    finally:
        _set(optimizer, given)


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> list[float | torch.Tensor]:
    """Multiply the learning rates; return the previous ones."""
    given = [group["lr"] for group in optimizer.param_groups]
    _set(optimizer, [lr * factor for lr in given])
    return given


def _set(optimizer: torch.optim.Optimizer, rates: list[float | torch.Tensor]) -> None:
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
