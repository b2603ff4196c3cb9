"""Steps of the sparse optimizers on GPU: what the kernels need to know, handed over with no wait and no allocation."""

from typing import Any

import numpy as np
import torch

from lightning_hetero.optim import kernels
from lightning_hetero.optim.kernel_step import KernelStep

__all__ = ["Marked", "TritonSteps"]

TILE = 32

TURNS = 4
"""Steps whose tables may be on their way to the device at a time."""

OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


class Marked(KernelStep):
    """Touched blocks by a mark for each block, bool."""

    def _sgd(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        p, g, *buffers = tensors
        noted, table = (p if t is None else t for t in (self.noted, self.table))
        kernels.sparse_sgd[self._grid](
            p, g, buffers[0] if buffers else p, self.touched.view(torch.uint8), noted, table, self.paid, self.step,
            *rates, p.numel(), len(self.touched), BLOCK=self.block, TILE=TILE, MOMENTUM=bool(buffers),
            NESTEROV=nesterov, AHEAD=ahead, OWES=self.table is not None, **OPTIONS,
        )  # fmt: skip

    def _adamw(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, ahead: bool) -> None:
        kernels.sparse_adamw[self._grid](
            *tensors, self.touched.view(torch.uint8), self.noted, self.table, self.paid, self.step,
            *rates, tensors[0].numel(), len(self.touched), BLOCK=self.block, TILE=TILE, AHEAD=ahead, **OPTIONS,
        )  # fmt: skip

    @property
    def _grid(self) -> tuple[int]:
        return (-(-len(self.touched) // TILE),)


class TritonSteps:
    """Tables of owed steps on the device, copied once a step through pinned buffers that take turns.

    Each table has its own buffers, so that the host waits for a copy of :data:`TURNS` steps ago, and for no later one.

    Args:
        block: elements of a block.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._uploads: dict[tuple[int, torch.device], _Upload] = {}

    def table(self, number: int, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """The table of this number in this step, on a device."""
        if (number, device) not in self._uploads:
            self._uploads[number, device] = _Upload(rows.shape, device)
        return self._uploads[number, device](rows)

    def marked(
        self, touched: torch.Tensor, noted: torch.Tensor | None, paid: int, table: torch.Tensor | None, step: int
    ) -> Marked:
        """The marked blocks of one parameter, with the table of what they owe, if they owe anything."""
        return Marked(self.block, touched, noted, paid, table, step)


class _Upload:
    """A small table of the host on the device. Copies and kernels follow each other on one stream."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._on_device = torch.zeros(shape, device=device)
        self._staged = [torch.zeros(shape, pin_memory=pinned) for _ in range(TURNS)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(TURNS)]
        self._turn = 0

    def __call__(self, rows: np.ndarray) -> torch.Tensor:
        self._turn = (self._turn + 1) % TURNS
        staged, copied = self._staged[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # of some steps ago
        staged.copy_(torch.from_numpy(rows))
        self._on_device.copy_(staged, non_blocking=True)
        if copied is not None:
            copied.record()
        return self._on_device
