"""A step of a sparse optimizer in one kernel: the touched blocks, their history, and the numbers that it needs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

__all__ = [
    "FRACTION_BITS",
    "INTERVAL_SHIFT",
    "LAST_TOUCH_MASK",
    "MAX_DEFERRED_STEPS",
    "NEWEST_SHIFT",
    "Group",
    "KernelStep",
    "Tensors",
    "mean_intervals",
    "whole_intervals",
]

Group = dict[str, Any]
"""Settings of a parameter group, as torch keeps them."""

Tensors = TypeVar("Tensors")
"""Tensors of one parameter, or a list of those of each parameter."""

INTERVAL_SHIFT, FRACTION_BITS, NEWEST_SHIFT = 32, 8, 2
"""History of a block in one number. The lowest 32 bits are 1 plus the step of its last touch, 0 if there was none.
Above them is its mean interval, 1 plus 256 times the steps between two touches, 0 if that is not known. The newest
interval has a weight of a quarter, ``2 ** -NEWEST_SHIFT``."""

LAST_TOUCH_MASK = (1 << INTERVAL_SHIFT) - 1
"""Bits of the step in which a block was touched last."""

MAX_DEFERRED_STEPS = 512
"""Steps that a block may skip before all blocks are flushed, in one dense pass. Tables have a row for each number."""


def mean_intervals(history: torch.Tensor, step: int) -> torch.Tensor:
    """Return the mean interval of blocks that are touched in a step: 1 plus 256 times it; 0 at their first touch.

    Args:
        history: history of each block, in the format of :data:`INTERVAL_SHIFT`.
        step: number of this step.

    Example:
        >>> history = torch.tensor([0, 3, 3 + (257 << INTERVAL_SHIFT)])
        >>> mean_intervals(history, step=8).tolist()  # skipped for 5 steps; for 1 before
        [0, 1281, 513]
    """
    touched, mean = history & LAST_TOUCH_MASK, history >> INTERVAL_SHIFT
    newest = touched.sub(step).neg_().bitwise_left_shift_(FRACTION_BITS).add_(1)
    known = (newest - mean).bitwise_right_shift_(NEWEST_SHIFT).add_(mean)
    return torch.where(mean > 0, known, newest).masked_fill_(touched == 0, 0)


def whole_intervals(interval: torch.Tensor) -> torch.Tensor:
    """Return mean intervals in whole steps, rounded down.

    Example:
        >>> whole_intervals(torch.tensor([1, 256, 257])).tolist()
        [0, 0, 1]
    """
    return interval - 1 >> FRACTION_BITS


@dataclass(frozen=True)
class KernelStep(ABC, Generic[Tensors]):
    """Touched blocks in one step, of one parameter or, if a kernel takes all parameters of a group, of each of them.

    Args:
        block: elements of a block.
        step: number of this step.
    """

    block: int
    step: int

    def sgd(self, tensors: Tensors, group: Group, *, remaining: float | None) -> None:
        """Step with momentum SGD.

        Args:
            tensors: parameter, gradient and, with momentum, its buffer: without gaps in memory.
            group: settings.
            remaining: factor of the move that momentum would still make, ``None`` if momentum is deferred. If given,
                the second coefficient of the table of deferred updates is the share of momentum that a touched block
                keeps.
        """
        rates = (group["lr"], group["weight_decay"], group["momentum"], remaining or 0.0)
        self._sgd(tensors, rates, nesterov=bool(group["nesterov"]), ahead=remaining is not None)

    def adamw(self, tensors: Tensors, group: Group, *, number: int, ahead: float, deferred_eps: float) -> None:
        """Step with AdamW.

        Args:
            tensors: parameter, gradient and both moments: without gaps in memory.
            group: settings.
            number: number of this step in the bias corrections, ``t``.
            ahead: geometric sum that is applied ahead; 1 if nothing is.
            deferred_eps: added to the root of ``v`` in deferred updates.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        size, root = -lr * ahead / (1 - beta1**number), (1 - beta2**number) ** -0.5
        rates = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, root, size, group["eps"], deferred_eps)
        self._adamw(tensors, rates, ahead=ahead > 1)

    @abstractmethod
    def _sgd(self, tensors: Tensors, rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        """Step by learning rate, weight decay, momentum, and the factor of the momentum that is applied ahead."""

    @abstractmethod
    def _adamw(self, tensors: Tensors, rates: tuple[float, ...], *, ahead: bool) -> None:
        """Step by AdamW's numbers.

        In this order: ``1 - lr w``; ``1 - beta_1``; ``beta_2``; ``1 - beta_2``; ``1 / sqrt(1 - beta_2^t)``; ``-lr / (1
        - beta_1^t)``, times the geometric sum that is applied ahead; ``eps``; the number that is added to the root of
        ``v`` in deferred updates.
        """
