"""Steps of the sparse optimizers on CPU by Numba's loops: what these need to know."""

import numpy as np
import torch

from lightning_hetero.optim import numba_kernels as kernels
from lightning_hetero.optim.kernel_step import KernelStep

__all__ = ["Numbered", "warm"]

NOTHING = np.zeros(0, np.float32)
NO_TABLE = np.zeros((0, 4), np.float32)


class Numbered(KernelStep):
    """Touched blocks by their numbers."""

    def _sgd(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        p, g, *buffers = (t.numpy() for t in tensors)
        lr, decay, momentum, rest = map(np.float32, rates)
        kernels.sparse_sgd(
            p, buffers[0] if buffers else NOTHING, g, *self._where(), self.block, lr, decay, momentum, rest, nesterov,
            ahead,
        )  # fmt: skip

    def _adamw(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, ahead: bool) -> None:
        p, g, m, v = (t.numpy() for t in tensors)
        kernels.sparse_adamw(p, m, v, g, *self._where(), self.block, tuple(map(np.float32, rates)), ahead)

    def _where(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        return self.touched.numpy(), self.settled.numpy(), NO_TABLE if self.table is None else self.table, self.step


def warm() -> None:
    """Compile the loops, so that no step has to; they are kept on disk."""
    p, rows, table = torch.zeros(16), torch.zeros(1, dtype=torch.int64), np.zeros((1, 4), np.float32)
    group = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1.0}
    marked = Numbered(16, rows, rows.clone(), table, 0)
    marked.sgd([p, p], group, rest=None)
    marked.adamw([p] * 4, group, number=1, ahead=1.0, small=1.0)
