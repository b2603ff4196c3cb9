"""Learning rates of one local step: the user's, times the factor of this rank's batch size."""

from typing import Any

__all__ = ["scale_rates", "set_rates"]


def scale_rates(optimizer: Any, factor: float) -> list[Any]:
    """Multiply the learning rates; returns those before."""
    given = [group["lr"] for group in optimizer.param_groups]
    set_rates(optimizer, [lr * factor for lr in given])
    return given


def set_rates(optimizer: Any, rates: list[Any]) -> None:
    """Give each group of parameters its learning rate."""
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
