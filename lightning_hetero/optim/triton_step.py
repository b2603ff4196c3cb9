"""Steps of the sparse optimizers on GPU: what the kernels need to know, handed over with no wait and no allocation."""

from typing import Any

import numpy as np
import torch

from lightning_hetero.optim import kernels
from lightning_hetero.optim.kernel_step import KernelStep

__all__ = ["Marked", "TritonSteps"]

TILE = 32
OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


class Marked(KernelStep):
    """Touched blocks by a mark for each block, bool."""

    def _sgd(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        p, g, *buffers = tensors
        table = p if self.table is None else self.table
        kernels.sparse_sgd[self._grid](
            p, g, buffers[0] if buffers else p, self.touched.view(torch.uint8), self.settled, table, self.step,
            *rates, p.numel(), len(self.touched), BLOCK=self.block, TILE=TILE, MOMENTUM=bool(buffers),
            NESTEROV=nesterov, AHEAD=ahead, OWES=self.table is not None, **OPTIONS,
        )  # fmt: skip

    def _adamw(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, ahead: bool) -> None:
        kernels.sparse_adamw[self._grid](
            *tensors, self.touched.view(torch.uint8), self.settled, self.table, self.step,
            *rates, tensors[0].numel(), len(self.touched), BLOCK=self.block, TILE=TILE, AHEAD=ahead, **OPTIONS,
        )  # fmt: skip

    @property
    def _grid(self) -> tuple[int]:
        return (-(-len(self.touched) // TILE),)


class TritonSteps:
    """The table of owed steps of each group on the device, copied once a step through pinned buffers that take turns.

    Args:
        block: elements of a block.
        longest: steps that a block may owe.
    """

    def __init__(self, block: int, longest: int) -> None:
        self.block, self.longest = block, longest
        self._uploads: dict[torch.device, _Upload] = {}

    def marked(self, touched: torch.Tensor, settled: torch.Tensor, table: np.ndarray | None, step: int) -> Marked:
        """The marked blocks of one parameter, with the table of its group if they owe anything."""
        if table is None:
            return Marked(self.block, touched, settled, None, step)
        if touched.device not in self._uploads:
            self._uploads[touched.device] = _Upload((self.longest + 1, table.shape[1]), touched.device)
        return Marked(self.block, touched, settled, self._uploads[touched.device](table), step)


class _Upload:
    """A small table of the host on the device. Copies and kernels follow each other on one stream."""

    def __init__(self, shape: tuple[int, int], device: torch.device, turns: int = 4) -> None:
        pinned = device.type == "cuda"
        self._on_device = torch.zeros(shape, device=device)
        self._staged = [torch.zeros(shape, pin_memory=pinned) for _ in range(turns)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(turns)]
        self._turn, self._last = 0, np.zeros(0)

    def __call__(self, table: np.ndarray) -> torch.Tensor:
        if table is self._last:  # another parameter of the same group
            return self._on_device
        self._turn, self._last = (self._turn + 1) % len(self._staged), table
        staged, copied = self._staged[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # of some steps ago
        staged[: len(table)].copy_(torch.from_numpy(table))
        self._on_device.copy_(staged, non_blocking=True)
        if copied is not None:
            copied.record()
        return self._on_device
