"""Steps of the sparse optimizers on GPU: what the kernels need to know, handed over with no wait and no allocation."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl

from lightning_hetero.optim.sparse.kernel_interface import KernelStep
from lightning_hetero.optim.sparse.triton_gpu import kernels
from lightning_hetero.optim.sparse.triton_gpu.parameter_tables import Owners, Upload

__all__ = ["Marked", "TritonSteps"]

TILE, ITERS = 32, 8
"""Blocks that a program works on at once, and how often."""

Waiting = dict[Any, list[list[torch.Tensor]]]

OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


def type_of(t: torch.Tensor) -> Any:
    """The type of a tensor's elements as Triton calls it."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[t.dtype]


@dataclass(frozen=True)
class Marked(KernelStep):
    """Touched blocks of one parameter by a mark for each block, bool; its step waits for those of other parameters.

    Args:
        waiting: where to leave it.
    """

    waiting: Waiting = field(default_factory=dict)

    def _sgd(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        flags = (
            ("MOMENTUM", len(tensors) > 2),
            ("NESTEROV", nesterov),
            ("AHEAD", ahead),
            ("OWES", self.table is not None),
        )
        self._wait("sparse_sgd", tensors, "PGM", rates, flags)

    def _adamw(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, ahead: bool) -> None:
        self._wait("sparse_adamw", tensors, "PGMV", rates, (("AHEAD", ahead),))

    def _wait(
        self, kernel: str, tensors: list[torch.Tensor], letters: str, rates: tuple[float, ...], flags: tuple[Any, ...]
    ) -> None:
        p = tensors[0]
        four = [*tensors, p, p][:4]  # where there is none, it is not read
        types = tuple(zip(letters, map(type_of, four), strict=False))
        table, noted = (p if t is None else t for t in (self.table, self.noted))
        rates = tuple(map(float, rates))  # a weight decay of 0 is an int, for which there would be another build
        own = None if self.table is None else table
        key = kernel, types, flags, self.block, rates, self.paid, self.step, p.device, own
        self.waiting.setdefault(key, []).append([*four, self.touched, noted])


class TritonSteps:
    """Tables of owed steps on the device, copied once a step through pinned buffers that take turns.

    Each table has its own buffers, so that the host waits for a copy of some steps ago, and for no later one
    (:data:`~lightning_hetero.optim.sparse.triton_gpu.parameter_tables.TURNS`).

    Args:
        block: elements of a block.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._uploads: dict[tuple[int, torch.device], Upload] = {}
        self._waiting: Waiting = {}
        self._owners: dict[Any, Owners] = {}

    def table(self, number: int, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """The table of this number in this step, on a device."""
        if (number, device) not in self._uploads:
            self._uploads[number, device] = Upload(rows.shape, torch.float32, device)
        return self._uploads[number, device](rows)

    def marked(
        self, touched: torch.Tensor, noted: torch.Tensor | None, paid: int, table: torch.Tensor | None, step: int
    ) -> Marked:
        """The marked blocks of one parameter, with the table of what they owe, if they owe anything."""
        return Marked(self.block, touched, noted, paid, table, step, self._waiting)

    def launch(self) -> None:
        """Take the steps that wait: one launch, or two, for all parameters of a group that have the same types."""
        waiting, numbers = self._waiting, Counter[Any]()
        for (kernel, types, flags, block, rates, paid, step, device, table), tensors in waiting.items():
            kind = kernel, types, flags, device
            number = kind, numbers[kind]
            numbers[kind] += 1
            if number not in self._owners:
                self._owners[number] = Owners(device, TILE * ITERS)
            addresses, parts = self._owners[number].of(tensors, block)
            for chunks, unit in parts:
                getattr(kernels, kernel)[(len(chunks),)](
                    addresses, chunks, addresses if table is None else table, paid, step, *rates,
                    **dict(types), BLOCK=block, TILE=TILE, UNIT=unit, **dict(flags), **OPTIONS,
                )  # fmt: skip
        waiting.clear()
