"""Steps of the sparse optimizers on CPU by Numba's loops: the arguments of these loops."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.optim.sparse.block_history import BlockHistory
from lightning_hetero.optim.sparse.kernel_interface import KernelStep
from lightning_hetero.optim.sparse.numba_jit import kernels

__all__ = ["NumberedBlocks", "warm"]

NOTHING = torch.zeros(0, dtype=torch.int64)
NO_TABLE = np.zeros((0, 4), np.float32)


@dataclass(frozen=True)
class NumberedBlocks(KernelStep[list[list[torch.Tensor]]]):
    """Touched blocks by their numbers, for all parameters of a group in one call.

    Args:
        touched: numbers of the touched blocks of each parameter.
        histories: history of the blocks of each parameter.
        table: coefficients of deferred updates, float32, by number of skipped steps; ``None`` if nothing is deferred.
    """

    touched: list[torch.Tensor]
    histories: list[BlockHistory]
    table: npt.NDArray[np.float32] | None

    def _sgd(self, tensors: list[list[torch.Tensor]], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        lr, decay, momentum, remaining = map(np.float32, rates)
        kernels.sparse_sgd(*self._where(tensors), lr, decay, momentum, remaining, nesterov, ahead)

    def _adamw(self, tensors: list[list[torch.Tensor]], rates: tuple[float, ...], *, ahead: bool) -> None:
        kernels.sparse_adamw(*self._where(tensors), tuple(map(np.float32, rates)), ahead)

    def _where(
        self, tensors: list[list[torch.Tensor]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int, int]:
        """Return the addresses and the table for the loops; the tensors stay alive until the loops are done."""
        places = []
        for own, rows, history in zip(tensors, self.touched, self.histories, strict=True):
            noted = NOTHING if history.blocks is None else history.blocks
            sizes = own[0].numel(), len(rows), len(noted), len(own) - 2, history.flushed_at
            addresses = [t.data_ptr() for t in (rows, noted, *own)]
            places.append((*sizes, *addresses, *(0,) * (4 - len(own))))
        return np.array(places), NO_TABLE if self.table is None else self.table, self.step, self.block


def warm() -> None:
    """Compile the loops before the first step; they are cached on disk."""
    p, rows, table = torch.zeros(16), torch.zeros(1, dtype=torch.int64), np.zeros((1, 4), np.float32)
    group = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1.0}
    history = BlockHistory((0, None, 0), 0, rows.clone())
    blocks = NumberedBlocks(16, 0, [rows], [history], table)
    blocks.sgd([[p, p]], group, remaining=None)
    blocks.adamw([[p] * 4], group, number=1, ahead=1.0, deferred_eps=1.0)
