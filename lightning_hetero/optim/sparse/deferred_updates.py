"""What blocks owe after each number of steps without a gradient: tables of coefficients.

The formulas are in :mod:`lightning_hetero.optim.sparse.rules`. Products are carried from step to step, one operation
after the other, so that rates and betas may change in every step, and all ranks get the same bits.
"""

from typing import Any, Literal

import numpy as np
import torch

from lightning_hetero.optim.sparse.kernel_interface import LONGEST

__all__ = ["Debts", "Kind"]

Kind = Literal["decay", "later", "waits", "adamw"]
"""How blocks owe: decay alone; momentum and decay; decay, while momentum is paid ahead by waits; as AdamW."""

LARGEST = 1e30
"""Bound of a coefficient, so that times a moment of 0 it stays 0 in float32."""


class Debts:
    """Coefficients ``c`` of what 0, 1, ... owed steps do, of parameters that take the same steps.

    Parameter ``p`` and momentum ``b`` become ``c0 p + c1 b`` and ``c2 p + c3 b``. If momentum is paid ahead by waits,
    ``c1`` is not owed: it is the share of momentum that a block keeps, by the steps that it waits. AdamW's parameter
    becomes ``c0 p - c1 m / (sqrt(v) + small)``, its moments ``c2 m`` and ``c3 v``.

    Args:
        kind: how they owe.

    Example:
        >>> debts = Debts("decay")
        >>> for _ in range(3):
        ...     debts.add_sgd(lr=0.5, decay=0.5, momentum=0.0, nesterov=False)
        >>> debts.rows[:4, 0].tolist()
        [1.0, 0.75, 0.5625, 0.421875]
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.rows = np.zeros((LONGEST + 1, 4))
        self.rows[:, [0, 3]] = 1.0
        if kind == "adamw":
            self.rows[:, 2] = 1.0
        self.steps = 0
        """Steps in the table."""
        self.indebted = False
        """Whether anything is owed, rather than noted only."""
        self.small = 1e-30
        """What is added to the root of AdamW's ``v``, by the last of these steps."""
        self._share: float | None = None

    def of(self, owed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of blocks that owe so many steps, shape ``(4, blocks, 1)``."""
        return torch.from_numpy(self.rows).to(owed.device, dtype)[owed].T.unsqueeze(-1)

    def keep(self, share: float) -> None:
        """A block keeps this share of its momentum for each step that it waits."""
        if self._share != share:
            self.rows[1:, 1], self._share = share, share
            self.rows[0, 1] = 1.0
            np.cumprod(self.rows[:, 1], out=self.rows[:, 1])

    def add_sgd(self, *, lr: float, decay: float, momentum: float, nesterov: bool) -> None:
        """One more step of SGD without a gradient."""
        self.indebted |= bool(decay) or self.kind == "later"
        before, after = self._shift()
        if self.kind != "later":  # what is paid ahead moves by the sum of all that its decay does to momentum
            after[:, 0] = (1.0 - lr * decay / (1.0 - (momentum if self.kind == "waits" else 0.0))) * before[:, 0]
            return
        first, second = 1.0 - lr * decay * (1.0 + momentum if nesterov else 1.0), -lr * momentum
        second = second * momentum if nesterov else second
        for own, through in ((0, 2), (1, 3)):
            after[:, own] = first * before[:, own] + second * before[:, through]
            after[:, through] = decay * before[:, own] + momentum * before[:, through]

    def add_adamw(self, *, lr: float, decay: float, betas: tuple[float, float], eps: float, number: int) -> None:
        """One more step of AdamW without a gradient, of this number in the bias corrections."""
        self.indebted, shrink = True, 1.0 - lr * decay
        root = (1.0 - betas[1] ** number) ** 0.5
        before, after = self._shift()
        after[:, 2], after[:, 3] = betas[0] * before[:, 2], betas[1] * before[:, 3]
        pull = lr * root / (1.0 - betas[0] ** number)
        after[:, 0] = shrink * before[:, 0]
        after[:, 1] = np.minimum(shrink * before[:, 1] + pull * (after[:, 2] / np.sqrt(after[:, 3])), LARGEST)
        self.small = float(max(eps * root, 1e-30))

    def _shift(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """What was owed after 0, 1, ... steps, and where it goes: one row on."""
        self.steps += 1
        return self.rows[: self.steps].copy(), self.rows[1 : self.steps + 1]
