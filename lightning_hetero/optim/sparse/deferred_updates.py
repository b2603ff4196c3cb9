"""Deferred updates of blocks after each number of steps without a gradient: tables of coefficients.

The formulas are in :mod:`lightning_hetero.optim.sparse.sgd` and :mod:`lightning_hetero.optim.sparse.adamw`. Products
are carried from step to step, one operation after the other. So rates and betas may change in every step, and all ranks
get the same bits.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.optim.sparse.kernel_interface import MAX_DEFERRED_STEPS

__all__ = ["DeferredUpdates", "Kind"]

Kind = Literal["decay", "later", "interval", "adamw"]
"""Updates that are deferred: decay alone; momentum and decay; decay, while momentum is applied ahead by intervals;
those of AdamW."""

Rows = npt.NDArray[np.float64]


class DeferredUpdates:
    """Coefficients ``c`` of the updates by 0, 1, ... skipped steps, for parameters that take the same steps.

    Parameter ``p`` and momentum ``b`` become ``c0 p + c1 b`` and ``c2 p + c3 b``. If momentum is applied ahead by
    intervals, ``c1`` is not an update but the share of momentum that a block keeps, by the steps of its interval.
    AdamW's parameter becomes ``c0 p - c1 m / (sqrt(v) + eps)``, its moments ``c2 m`` and ``c3 v``.

    Args:
        kind: kind of the updates.

    Example:
        >>> deferred = DeferredUpdates("decay")
        >>> for _ in range(3):
        ...     deferred.add_sgd(lr=0.5, decay=0.5, momentum=0.0, nesterov=False)
        >>> deferred.rows[:4, 0].tolist()
        [1.0, 0.75, 0.5625, 0.421875]
    """

    largest = 1e30
    """Bound of a coefficient, so that its product with a moment of 0 is 0 in float32."""
    least_eps = 1e-30
    """Least ``eps``, so that nothing is divided by 0."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.rows: Rows = np.zeros((MAX_DEFERRED_STEPS + 1, 4))
        self.rows[:, [0, 3]] = 1.0
        if kind == "adamw":
            self.rows[:, 2] = 1.0
        self.steps = 0
        """Steps in the table."""
        self.has_deferred = False
        """Whether these steps change blocks, and are not only counted."""
        self.eps = self.least_eps
        """Number that is added to the root of AdamW's ``v``, by the last of these steps."""
        self._share: float | None = None

    def of(self, skipped: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the coefficients of blocks that skipped these numbers of steps, shape ``(4, blocks, 1)``."""
        return torch.from_numpy(self.rows).to(skipped.device, dtype)[skipped].T.unsqueeze(-1)

    def keep(self, share: float) -> None:
        """Let a block keep this share of its momentum for each step of its interval."""
        if self._share != share:
            self.rows[1:, 1], self._share = share, share
            self.rows[0, 1] = 1.0
            np.cumprod(self.rows[:, 1], out=self.rows[:, 1])

    def add_sgd(self, *, lr: float, decay: float, momentum: float, nesterov: bool) -> None:
        """Add one more step of SGD without a gradient."""
        self.has_deferred |= bool(decay) or self.kind == "later"
        before, after = self._shift()
        if self.kind != "later":  # with momentum ahead, decay includes its own effect through momentum
            after[:, 0] = (1.0 - lr * decay / (1.0 - (momentum if self.kind == "interval" else 0.0))) * before[:, 0]
            return
        first, second = 1.0 - lr * decay * (1.0 + momentum if nesterov else 1.0), -lr * momentum
        second = second * momentum if nesterov else second
        for own, through in ((0, 2), (1, 3)):
            after[:, own] = first * before[:, own] + second * before[:, through]
            after[:, through] = decay * before[:, own] + momentum * before[:, through]

    def add_adamw(self, *, lr: float, decay: float, betas: tuple[float, float], eps: float, number: int) -> None:
        """Add one more step of AdamW without a gradient, of this number in the bias corrections."""
        self.has_deferred, shrink = True, 1.0 - lr * decay
        root = (1.0 - betas[1] ** number) ** 0.5
        before, after = self._shift()
        after[:, 2], after[:, 3] = betas[0] * before[:, 2], betas[1] * before[:, 3]
        pull = lr * root / (1.0 - betas[0] ** number)
        after[:, 0] = shrink * before[:, 0]
        after[:, 1] = np.minimum(shrink * before[:, 1] + pull * (after[:, 2] / np.sqrt(after[:, 3])), self.largest)
        self.eps = float(max(eps * root, self.least_eps))

    def _shift(self) -> tuple[Rows, Rows]:
        """Return the coefficients of 0, 1, ... skipped steps, and the rows that receive them: one row further."""
        self.steps += 1
        return self.rows[: self.steps].copy(), self.rows[1 : self.steps + 1]
