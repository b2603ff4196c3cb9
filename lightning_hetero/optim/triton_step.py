"""Steps of the sparse optimizers on GPU: what the kernels need to know, handed over with no wait and no allocation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_hetero.optim import kernels

__all__ = ["Marked", "TritonSteps"]

TILE = 32
OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


@dataclass(frozen=True)
class Marked:
    """Blocks of one parameter in one step.

    Args:
        block: elements of a block.
        touched: a mark for each block, bool.
        settled: step up to which each block is settled.
        table: coefficients of owed steps, ``None`` if nothing is owed.
        step: number of this step since the table began.
    """

    block: int
    touched: torch.Tensor
    settled: torch.Tensor
    table: torch.Tensor | None
    step: int

    def sgd(self, tensors: list[torch.Tensor], group: dict[str, Any], *, rest: float | None) -> None:
        """Momentum SGD.

        Args:
            tensors: parameter, gradient and, with momentum, its buffer: flat.
            group: settings.
            rest: what a touched block takes of its momentum at once, ``None`` if it is paid later.
        """
        p, g, *buffers = tensors
        table = p if self.table is None else self.table
        kernels.sparse_sgd[self._grid](
            p, g, buffers[0] if buffers else p, self.touched.view(torch.uint8), self.settled, table, self.step,
            group["lr"], group["weight_decay"], group["momentum"], rest or 0.0, p.numel(), len(self.touched),
            BLOCK=self.block, TILE=TILE, MOMENTUM=bool(buffers), NESTEROV=bool(group["nesterov"]),
            AHEAD=rest is not None, OWES=self.table is not None, **OPTIONS,
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
        p, g, m, v = tensors
        kernels.sparse_adamw[self._grid](
            p, g, m, v, self.touched.view(torch.uint8), self.settled, self.table, self.step,
            1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, (1 - beta2**number) ** 0.5,
            lr * ahead / (1 - beta1**number), group["eps"], small, p.numel(), len(self.touched),
            BLOCK=self.block, TILE=TILE, AHEAD=ahead > 1, **OPTIONS,
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
