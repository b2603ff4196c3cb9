"""Chunks for the programs of a kernel, for all parameters of a bucket: one launch instead of one per parameter.

A chunk is some blocks of one parameter. Its row has the start of its gradient in the bucket, the number of elements,
its first block in the model, the number of blocks, and the number of the parameter. Start and length are counted in
units of 16 bytes, which a GPU reads at once; chunks that begin or end between two units are in a table of their own, in
units of one element.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.compression.layout import Slot

__all__ = ["COLUMNS", "BucketChunks", "Chunks", "chunk_rows"]

COLUMNS = len(("begin of the gradient", "elements", "first block", "blocks", "parameter"))
"""Numbers of a chunk's row."""


def chunk_rows(slots: Sequence[Slot], numbers: Sequence[int], block: int, size: int) -> npt.NDArray[np.int64]:
    """Return the rows, in elements, of the chunks of parameters whose gradients lie one after the other.

    Args:
        slots: places of the parameters.
        numbers: their numbers.
        block: elements of a block.
        size: blocks of a chunk.

    Example:
        >>> from lightning_hetero.compression.layout import Layout
        >>> slots = Layout.of([("weight", 40), ("bias", 3)], block=16).slots
        >>> chunk_rows(slots, [0, 1], block=16, size=2).tolist()
        [[0, 32, 0, 2, 0], [32, 8, 2, 1, 0], [40, 3, 3, 1, 1]]
    """
    rows, at = [np.zeros((0, COLUMNS), np.int64)], 0
    for slot, number in zip(slots, numbers, strict=True):
        first = np.arange(0, slot.padded // block, size)
        blocks = np.minimum(slot.padded // block - first, size)
        left = np.minimum(slot.numel - first * block, size * block)
        begin, same = at + first * block, np.full_like(first, number)
        rows.append(np.stack([begin, left, slot.start // block + first, blocks, same], axis=1))
        at += slot.numel
    return np.concatenate(rows)


@dataclass(frozen=True)
class Chunks:
    """Chunks of one launch.

    Args:
        table: a row of :data:`COLUMNS` numbers for each chunk, int64, on the device.
        unit: elements that are counted as one.
    """

    table: torch.Tensor
    unit: int

    @property
    def grid(self) -> tuple[int]:
        """Grid of the launch: one program for each chunk."""
        return (len(self.table),)


class BucketChunks:
    """Chunks of each bucket, made on first use: DDP's buckets stay the same from the second step on.

    Args:
        block: elements of a block.
        size: blocks of a chunk.
        device: device of the kernels.
        slots: places of all parameters of the model.
    """

    def __init__(self, block: int, size: int, device: torch.device, slots: Sequence[Slot]) -> None:
        self._block, self._size, self._device = block, size, device
        self._numbers = {slot: number for number, slot in enumerate(slots)}
        self._known: dict[tuple[int, ...], tuple[list[Slot], list[Chunks]]] = {}

    def of(self, slots: Sequence[Slot], itemsize: int) -> list[Chunks]:
        """Return the launches for a bucket of gradients of ``itemsize`` bytes per element: at most two, none empty."""
        slots = list(slots)
        key = itemsize, len(slots), slots[0].start if slots else 0  # the whole list is compared: slots hash slowly
        if key not in self._known or self._known[key][0] != slots:
            self._known[key] = slots, self._made(slots, 16 // itemsize)
        return self._known[key][1]

    def _made(self, slots: list[Slot], unit: int) -> list[Chunks]:
        rows = chunk_rows(slots, [self._numbers[slot] for slot in slots], self._block, self._size)
        whole = (rows[:, :2] % unit == 0).all(axis=1)
        parts = (rows[whole] // np.array([unit, unit, 1, 1, 1]), unit), (rows[~whole], 1)
        return [Chunks(torch.from_numpy(part).to(self._device), n) for part, n in parts if len(part)]
