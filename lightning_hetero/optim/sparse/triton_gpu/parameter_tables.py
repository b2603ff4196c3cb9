"""Tables for kernels: addresses of many parameters' tensors, and the part of a parameter that each program processes.

Parameters and their state keep their addresses, and so do gradients that are views of DDP's buckets. If gradients are
allocated in each step, their addresses are copied to the device again, through pinned memory and without waiting.
"""

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["STAGED_COPIES", "UNIT", "ParameterTables", "PinnedUpload", "chunk_rows"]

STAGED_COPIES = 4
"""Steps whose tables may be in flight to the device at a time."""

UNIT = 8
"""Elements counted as one where 16 bytes can be read at once: one read of 16-bit elements, two of 32-bit elements."""


class ParameterTables:
    """Tables of the parameters of one launch.

    Args:
        device: device of the parameters.
        size: blocks of a chunk.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._addresses: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._sizes: list[tuple[int, bool]] = []
        self._upload: PinnedUpload | None = None
        self._table = torch.zeros(0, dtype=torch.int64)
        self._chunks: list[tuple[torch.Tensor, int]] = []

    def of(self, tensors: list[list[torch.Tensor]], block: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]:
        """Return the tables for these tensors.

        Args:
            tensors: for each parameter: itself, its gradient, its buffers, its marks and its history.
            block: elements of a block.

        Returns:
            Addresses, then the aligned chunks (begin and end at multiples of 16 bytes) and the others, with their unit.
        """
        addresses = np.array([[t.data_ptr() for t in row] for row in tensors], np.int64)
        if addresses.shape != self._addresses.shape or (addresses != self._addresses).any():
            if self._upload is None or addresses.shape != self._addresses.shape:
                self._upload = PinnedUpload(addresses.shape, torch.int64, self._device)
            self._addresses, self._table = addresses, self._upload(addresses)
        even = (addresses[:, :4] % 16 == 0).all(axis=1).tolist()
        sizes = [(row[0].numel(), is_even) for row, is_even in zip(tensors, even, strict=True)]
        if sizes != self._sizes:
            self._sizes = sizes
            rows = chunk_rows(sizes, block, self._size)
            whole = rows[:, 4] > 0
            for_units = rows[whole, :4] // np.array([1, 1, 1, UNIT])
            parts = (for_units, UNIT), (rows[~whole, :4], 1)
            self._chunks = [(torch.from_numpy(part).to(self._device), unit) for part, unit in parts if len(part)]
        return self._table, self._chunks


def chunk_rows(sizes: list[tuple[int, bool]], block: int, size: int) -> npt.NDArray[np.int64]:
    """Return for each chunk: number of the parameter, first block, blocks, elements, and whether it is in units.

    Args:
        sizes: elements of each parameter, and whether its tensors begin at multiples of 16 bytes.
        block: elements of a block.
        size: blocks of a chunk.

    Example:
        >>> chunk_rows([(40, True), (3, True), (16, False)], block=16, size=2).tolist()
        [[0, 0, 2, 32, 1], [0, 2, 1, 8, 1], [1, 0, 1, 3, 0], [2, 0, 1, 16, 0]]
    """
    found = [np.zeros((0, 5), np.int64)]
    for number, (numel, even) in enumerate(sizes):
        first = np.arange(0, -(-numel // block), size)
        blocks = np.minimum(-(-numel // block) - first, size)
        left = np.minimum(numel - first * block, size * block)
        whole = (left % UNIT == 0) & (first * block % UNIT == 0) & even
        found.append(np.stack([np.full_like(first, number), first, blocks, left, whole], axis=1))
    return np.concatenate(found)


class PinnedUpload:
    """Copy of a small host table on the device; copies and kernels follow each other on one stream.

    Args:
        shape: shape of the table.
        dtype: type of its numbers.
        device: device on which it is read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._on_device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(STAGED_COPIES)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(STAGED_COPIES)]
        self._turn = 0

    def __call__(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
        """Return the table with these rows."""
        self._turn = (self._turn + 1) % STAGED_COPIES
        staged, copied = self._staged[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # the copy of some steps ago reads this buffer until then
        staged.copy_(torch.from_numpy(rows))
        self._on_device.copy_(staged, non_blocking=True)
        if copied is not None:
            copied.record()
        return self._on_device
