"""Steps whose gradient is not finite: left out on all ranks together, and logged."""

import logging
from collections.abc import Iterable

import torch

__all__ = ["DroppedSteps", "all_finite", "clear"]

log = logging.getLogger("lightning_hetero")


class DroppedSteps:
    """Number of steps that were left out so far."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, step: int, where: str) -> None:
        """Count one more step; the 1st, 2nd, 4th, 8th, ... are logged."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning(
                "a gradient was not finite in step %d %s: all ranks left that gradient out (%d so far)",
                step,
                where,
                self.count,
            )


def all_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the sum of all gradients is finite: a single read from the device.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([1.0, float("nan")])
        >>> all_finite([p])
        False
    """
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in _given(parameters)]
    sums = [gradient.sum(dtype=dtype) for gradient, dtype in zip(_given(parameters), wide, strict=True)]
    return not sums or bool(torch.isfinite(torch.stack([s.to(sums[0].device) for s in sums]).sum()))


def clear(parameters: Iterable[torch.Tensor]) -> None:
    """Set the gradients to 0."""
    for gradient in _given(parameters):
        gradient.zero_()


def _given(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
