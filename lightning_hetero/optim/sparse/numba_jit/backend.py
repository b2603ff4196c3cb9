"""Steps of the sparse optimizers on CPU by Numba's loops: what these need to know."""

import numpy as np
import torch

from lightning_hetero.optim.sparse.kernel_interface import KernelStep
from lightning_hetero.optim.sparse.numba_jit import kernels

__all__ = ["Numbered", "warm"]

NO_TABLE = np.zeros((0, 4), np.float32)


class Numbered(KernelStep):
    """Touched blocks by their numbers, for all parameters of a group in one call: a list with an entry for each."""

    def _sgd(self, tensors: list[list[torch.Tensor]], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        lr, decay, momentum, rest = map(np.float32, rates)
        kernels.sparse_sgd(*self._where(tensors), lr, decay, momentum, rest, nesterov, ahead)

    def _adamw(self, tensors: list[list[torch.Tensor]], rates: tuple[float, ...], *, ahead: bool) -> None:
        kernels.sparse_adamw(*self._where(tensors), tuple(map(np.float32, rates)), ahead)

    def _where(self, tensors: list[list[torch.Tensor]]) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where the loops find everything; tensors are alive until they are done."""
        places = [
            (own[0].numel(), len(rows), len(noted), len(own) - 2, paid, rows.data_ptr(), noted.data_ptr())
            + tuple([t.data_ptr() for t in own])
            + (0,) * (4 - len(own))
            for own, rows, noted, paid in zip(tensors, self.touched, self.noted, self.paid, strict=True)
        ]
        return np.array(places), NO_TABLE if self.table is None else self.table, self.step, self.block


def warm() -> None:
    """Compile the loops, so that no step has to; they are kept on disk."""
    p, rows, table = torch.zeros(16), torch.zeros(1, dtype=torch.int64), np.zeros((1, 4), np.float32)
    group = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1.0}
    marked = Numbered(16, [rows], [rows.clone()], [0], table, 0)
    marked.sgd([[p, p]], group, rest=None)
    marked.adamw([[p] * 4], group, number=1, ahead=1.0, small=1.0)
