"""A step of a sparse optimizer in one kernel: which blocks it touches, and by which numbers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FINE", "LONGEST", "NEWEST", "SHIFT", "UNDER", "KernelStep", "waits"]

SHIFT, FINE, NEWEST = 32, 8, 2
"""What is noted of a block in one number: in the lowest 32 bits 1 plus the step in which it was touched last, 0 if it
was not, and above them its mean wait, 1 plus 256 times the steps between two touches, 0 if that is not known. The
newest one counts for a quarter."""

LONGEST = 512
"""Steps that a block may owe; then all blocks are settled, in one dense pass."""

UNDER = (1 << SHIFT) - 1
"""Mask of the step."""


def waits(noted: torch.Tensor, step: int) -> torch.Tensor:
    """1 plus 256 times the mean wait of blocks that are touched in a step; 0 of those that are for the first time.

    Args:
        noted: of each block, as :data:`SHIFT` says.
        step: number of this step.

    Example:
        >>> waits(torch.tensor([0, 3, 3 + (257 << SHIFT)]), step=8).tolist()  # waited for 5 steps; for 1 before
        [0, 1281, 513]
    """
    touched, wait = noted & UNDER, noted >> SHIFT
    newest = touched.sub(step).neg_().bitwise_left_shift_(FINE).add_(1)
    known = (newest - wait).bitwise_right_shift_(NEWEST).add_(wait)
    return torch.where(wait > 0, known, newest).masked_fill_(touched == 0, 0)


@dataclass(frozen=True)
class KernelStep(ABC):
    """Touched blocks of one parameter in one step, or, where a kernel takes all parameters of a group, of each of them.

    Args:
        block: elements of a block.
        touched: which blocks, as the kernel wants it: their numbers, or a mark for each block.
        noted: when each block was touched last, and its wait, as :data:`SHIFT` says.
        paid: step up to which all blocks are settled.
        table: coefficients of owed steps, :data:`LONGEST` + 1 rows of them; ``None`` if nothing is owed.
        step: number of this step.
    """

    block: int
    touched: Any
    noted: Any
    paid: Any
    table: Any
    step: int

    def sgd(self, tensors: list[Any], group: dict[str, Any], *, rest: float | None) -> None:
        """Momentum SGD.

        Args:
            tensors: parameter, gradient and, with momentum, its buffer: without gaps in memory.
            group: settings.
            rest: what momentum would still move a block by, ``None`` if it is paid later. The second coefficient of
                the table is then the share of the momentum that a touched block keeps.
        """
        rates = (group["lr"], group["weight_decay"], group["momentum"], rest or 0.0)
        self._sgd(tensors, rates, nesterov=bool(group["nesterov"]), ahead=rest is not None)

    def adamw(self, tensors: list[Any], group: dict[str, Any], *, number: int, ahead: float, small: float) -> None:
        """AdamW.

        Args:
            tensors: parameter, gradient and both moments: without gaps in memory.
            group: settings.
            number: of this step in the bias corrections, ``t``.
            ahead: geometric sum of what is paid ahead; 1 if nothing is.
            small: added to the root of ``v`` in what is owed.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        size, root = -lr * ahead / (1 - beta1**number), (1 - beta2**number) ** -0.5
        rates = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, root, size, group["eps"], small)
        self._adamw(tensors, rates, ahead=ahead > 1)

    @abstractmethod
    def _sgd(self, tensors: list[Any], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        """By learning rate, weight decay, momentum, and what is paid of it at once."""

    @abstractmethod
    def _adamw(self, tensors: list[Any], rates: tuple[float, ...], *, ahead: bool) -> None:
        """By its numbers.

        In this order: ``1 - lr w``; ``1 - beta_1``; ``beta_2``; ``1 - beta_2``; ``1 / sqrt(1 - beta_2^t)``; ``-lr / (1
        - beta_1^t)``, times the geometric sum of what is paid ahead; ``eps``; what is added to the root of ``v`` in
        what is owed.
        """
