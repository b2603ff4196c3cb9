"""Steps of the sparse optimizers on CPU by Numba's loops: what these need to know."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_hetero.optim import numba_kernels as kernels

__all__ = ["Numbered", "warm"]

NOTHING = np.zeros(0, np.float32)
NO_TABLE = np.zeros((0, 4), np.float32)


@dataclass(frozen=True)
class Numbered:
    """Blocks of one parameter in one step, by their numbers.

    Args:
        block: elements of a block.
        rows: numbers of the touched blocks.
        settled: step up to which each block of the parameter is settled.
        table: coefficients of owed steps, ``None`` if nothing is owed.
        step: number of this step since the table began.
    """

    block: int
    rows: torch.Tensor
    settled: torch.Tensor
    table: np.ndarray | None
    step: int

    def sgd(self, tensors: list[torch.Tensor], group: dict[str, Any], *, rest: float | None) -> None:
        """Momentum SGD.

        Args:
            tensors: parameter, gradient and, with momentum, its buffer: flat.
            group: settings.
            rest: what a touched block takes of its momentum at once, ``None`` if it is paid later.
        """
        p, g, *buffers = (t.numpy() for t in tensors)
        rows, settled, table, step = self._where()
        kernels.sparse_sgd(
            p, buffers[0] if buffers else NOTHING, g, rows, settled, table, step, self.block, np.float32(group["lr"]),
            np.float32(group["weight_decay"]), np.float32(group["momentum"]), np.float32(rest or 0.0),
            bool(group["nesterov"]), rest is not None,
        )  # fmt: skip

    def adamw(
        self, tensors: list[torch.Tensor], group: dict[str, Any], *, number: int, ahead: float, small: float
    ) -> None:
        """AdamW.

        Args:
            tensors: parameter, gradient and both moments: flat.
            group: settings.
            number: of this step in the bias corrections, ``t``.
            ahead: geometric sum of what is paid ahead; 1 if nothing is.
            small: added to the root of ``v`` in what is owed.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        p, g, m, v = (t.numpy() for t in tensors)
        size = -lr * ahead / (1 - beta1**number)
        root = (1 - beta2**number) ** 0.5
        rates = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, root, size, group["eps"], small)
        kernels.sparse_adamw(
            p, m, v, g, *self._where(), self.block, tuple(np.float32(rate) for rate in rates), ahead > 1
        )

    def _where(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        return self.rows.numpy(), self.settled.numpy(), NO_TABLE if self.table is None else self.table, self.step


def warm() -> None:
    """Compile the loops, so that no step has to; they are kept on disk."""
    p, rows, table = torch.zeros(16), torch.zeros(1, dtype=torch.int64), np.zeros((1, 4), np.float32)
    group = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1.0}
    marked = Numbered(16, rows, rows.clone(), table, 0)
    marked.sgd([p, p], group, rest=None)
    marked.adamw([p] * 4, group, number=1, ahead=1.0, small=1.0)
