"""Steps of the sparse optimizers on CPU by Numba's loops: what these need to know."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_hetero.optim import numba_kernels as kernels

__all__ = ["Numbered", "warm"]

NO_TABLE = np.zeros((0, 4), np.float32)


@dataclass(frozen=True)
class Numbered:
    """Blocks of all parameters of a group in one step, by their numbers: one call for all of them.

    Args:
        block: elements of a block.
        rows: numbers of each parameter's touched blocks.
        settled: step up to which each block of each parameter is settled.
        table: coefficients of owed steps, ``None`` if nothing is owed.
        step: number of this step since the table began.
    """

    block: int
    rows: list[torch.Tensor]
    settled: list[torch.Tensor]
    table: np.ndarray | None
    step: int

    def sgd(self, tensors: list[list[torch.Tensor]], group: dict[str, Any], *, rest: float | None) -> None:
        """Momentum SGD.

        Args:
            tensors: of each parameter itself, its gradient and, with momentum, its buffer: without gaps in memory.
            group: settings.
            rest: what a touched block takes of its momentum at once, ``None`` if it is paid later.
        """
        kernels.sparse_sgd(
            *self._where(tensors), np.float32(group["lr"]), np.float32(group["weight_decay"]),
            np.float32(group["momentum"]), np.float32(rest or 0.0), bool(group["nesterov"]), rest is not None,
        )  # fmt: skip

    def adamw(
        self, tensors: list[list[torch.Tensor]], group: dict[str, Any], *, number: int, ahead: float, small: float
    ) -> None:
        """AdamW.

        Args:
            tensors: of each parameter itself, its gradient and both moments: without gaps in memory.
            group: settings.
            number: of this step in the bias corrections, ``t``.
            ahead: geometric sum of what is paid ahead; 1 if nothing is.
            small: added to the root of ``v`` in what is owed.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        size = -lr * ahead / (1 - beta1**number)
        root = (1 - beta2**number) ** 0.5
        rates = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, root, size, group["eps"], small)
        kernels.sparse_adamw(*self._where(tensors), tuple(np.float32(rate) for rate in rates), ahead > 1)

    def _where(self, tensors: list[list[torch.Tensor]]) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where the loops find everything; tensors are alive until they are done."""
        places = [
            (own[0].numel(), len(rows), len(settled), len(own) - 2, rows.data_ptr(), settled.data_ptr())
            + tuple([t.data_ptr() for t in own])
            + (0,) * (4 - len(own))
            for own, rows, settled in zip(tensors, self.rows, self.settled, strict=True)
        ]
        return np.array(places), NO_TABLE if self.table is None else self.table, self.step, self.block


def warm() -> None:
    """Compile the loops, so that no step has to; they are kept on disk."""
    p, rows, table = torch.zeros(16), torch.zeros(1, dtype=torch.int64), np.zeros((1, 4), np.float32)
    group = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1.0}
    marked = Numbered(16, [rows], [rows.clone()], table, 0)
    marked.sgd([[p, p]], group, rest=None)
    marked.adamw([[p] * 4], group, number=1, ahead=1.0, small=1.0)
