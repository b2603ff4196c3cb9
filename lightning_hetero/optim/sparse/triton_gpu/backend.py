"""Steps of the sparse optimizers on GPU: the kernels' arguments, passed without waiting and without allocation."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from lightning_hetero.optim.sparse.block_history import BlockHistory
from lightning_hetero.optim.sparse.kernel_interface import KernelStep
from lightning_hetero.optim.sparse.triton_gpu import kernels
from lightning_hetero.optim.sparse.triton_gpu.parameter_tables import ParameterTables, PinnedUpload

__all__ = ["MarkedBlocks", "TritonSteps"]


@dataclass(frozen=True)
class LaunchShape:
    """Blocks of a program.

    Args:
        tile: blocks that it processes at once.
        tiles: tiles that it processes one after the other.
    """

    tile: int = 32
    tiles: int = 8


SHAPE = LaunchShape()

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fusion, a product and a sum are rounded separately, as on CPU."""

ELEMENT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


Build = tuple[str, tuple[tuple[str, tl.dtype], ...], tuple[tuple[str, bool], ...], torch.device]


class Launch(NamedTuple):
    """Launch of a kernel: the properties that the steps of its parameters must have in common.

    Args:
        kernel: name of the kernel.
        types: types of the tensors, by the name of the kernel's argument.
        flags: flags of the kernel.
        block: elements of a block.
        rates: numbers of the step.
        flushed_at: step up to which all blocks are flushed.
        step: number of this step.
        device: device of the tensors.
        table: coefficients of deferred updates.
    """

    kernel: str
    types: tuple[tuple[str, tl.dtype], ...]
    flags: tuple[tuple[str, bool], ...]
    block: int
    rates: tuple[float, ...]
    flushed_at: int
    step: int
    device: torch.device
    table: torch.Tensor | None

    @property
    def build(self) -> Build:
        """Key of the compiled kernel: name, types, flags and device."""
        return self.kernel, self.types, self.flags, self.device


Queue = dict[Launch, list[list[torch.Tensor]]]


@dataclass(frozen=True)
class MarkedBlocks(KernelStep[list[torch.Tensor]]):
    """Touched blocks of one parameter, by a mark for each block; its step is queued with those of other parameters.

    Args:
        marks: marks of touched blocks, bool.
        history: history of its blocks.
        table: coefficients of deferred updates, on the device; ``None`` if nothing is deferred.
        queue: receives the step.
    """

    marks: torch.Tensor
    history: BlockHistory
    table: torch.Tensor | None
    queue: Queue = field(default_factory=dict)

    def _sgd(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, nesterov: bool, ahead: bool) -> None:
        flags = (
            ("MOMENTUM", len(tensors) > 2),
            ("NESTEROV", nesterov),
            ("AHEAD", ahead),
            ("DEFERS", self.table is not None),
        )
        self._enqueue("sparse_sgd", tensors, "PGM", rates, flags)

    def _adamw(self, tensors: list[torch.Tensor], rates: tuple[float, ...], *, ahead: bool) -> None:
        self._enqueue("sparse_adamw", tensors, "PGMV", rates, (("AHEAD", ahead),))

    def _enqueue(
        self,
        kernel: str,
        tensors: list[torch.Tensor],
        letters: str,
        rates: tuple[float, ...],
        flags: tuple[tuple[str, bool], ...],
    ) -> None:
        p = tensors[0]
        four = [*tensors, p, p][:4]  # missing tensors are not read
        types = tuple(zip(letters, (ELEMENT_TYPES[t.dtype] for t in four), strict=False))
        rates = tuple(map(float, rates))  # a weight decay of 0 is an int, which would compile the kernel again
        launch = Launch(
            kernel, types, flags, self.block, rates, self.history.flushed_at, self.step, p.device, self.table
        )
        blocks = p if self.history.blocks is None else self.history.blocks
        self.queue.setdefault(launch, []).append([*four, self.marks, blocks])


class TritonSteps:
    """Launcher of queued steps, with tables of deferred updates that are copied to the device once per step.

    Each table has its own pinned buffers, used in turn, so the host only waits for a copy of some steps ago
    (:data:`~lightning_hetero.optim.sparse.triton_gpu.parameter_tables.STAGED_COPIES`).

    Args:
        block: elements of a block.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._uploads: dict[tuple[int, torch.device], PinnedUpload] = {}
        self._queue: Queue = {}
        self._tables: dict[tuple[Build, int], ParameterTables] = {}

    def table(self, number: int, rows: npt.NDArray[np.float32], device: torch.device) -> torch.Tensor:
        """Return the table of this number in this step, on a device."""
        if (number, device) not in self._uploads:
            self._uploads[number, device] = PinnedUpload(rows.shape, torch.float32, device)
        return self._uploads[number, device](rows)

    def marked(self, marks: torch.Tensor, history: BlockHistory, table: torch.Tensor | None, step: int) -> MarkedBlocks:
        """Return the marked blocks of one parameter, with the table of its deferred updates, if it has any."""
        return MarkedBlocks(self.block, step, marks, history, table, self._queue)

    def launch(self) -> None:
        """Launch the queued steps: one or two launches for all parameters of a group with the same types."""
        launches = Counter[Build]()
        for launch, tensors in self._queue.items():
            build = launch.build
            key = build, launches[build]
            launches[build] += 1
            if key not in self._tables:
                self._tables[key] = ParameterTables(launch.device, SHAPE.tile * SHAPE.tiles)
            addresses, parts = self._tables[key].of(tensors, launch.block)
            table = addresses if launch.table is None else launch.table
            for chunks, unit in parts:
                getattr(kernels, launch.kernel)[(len(chunks),)](
                    addresses, chunks, table, launch.flushed_at, launch.step, *launch.rates,
                    **dict(launch.types), BLOCK=launch.block, TILE=SHAPE.tile, UNIT=unit, **dict(launch.flags),
                    **OPTIONS,
                )  # fmt: skip
        self._queue.clear()
