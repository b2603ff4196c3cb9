"""Bytes of compressed gradients by density, without process group, parameters or messages."""

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

__all__ = ["MessageSize"]

Densities = TypeVar("Densities", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class MessageSize:
    """Bytes that a worker sends to all others in a step at a density, computed from the number of blocks alone.

    Args:
        num_blocks: blocks of the model.
        world_size: workers that exchange messages.
        parts: bytes per block in each part of a message's values.
        listed: bytes besides indices and values if indices are listed, with 2 bytes per block.
        marked: bytes besides values if indices are a bitmap.
        marked_from: share of the blocks from which on indices are a bitmap.
        align: bytes to whose multiples indices and parts are rounded up.

    Example:
        >>> size = MessageSize(1000, 2, parts=(32,), listed=80, marked=192)
        >>> size.bytes(0.02), size.bytes(np.array([0.02, 1.0])).tolist()
        (432.0, [432.0, 32192.0])
    """

    num_blocks: int
    world_size: int
    parts: tuple[int, ...]
    listed: int
    marked: int
    marked_from: float = 0.1
    align: int = 16

    def bytes(self, density: Densities) -> Densities:
        """Return the bytes at each density, above 0, to 1."""
        shares = np.rint(self.num_blocks * np.asarray(density, dtype=float) * 2**20).astype(np.int64)
        k = np.clip(-(-shares // (self.world_size * 2**20)), 1, self.num_blocks)  # blocks_per_rank, for arrays
        k = np.where(np.asarray(density) >= 1.0, self.num_blocks, k)
        listed, *values = [-(-k * part // self.align) * self.align for part in (2, *self.parts)]
        indices = np.where(k >= self.marked_from * self.num_blocks, self.marked, self.listed + listed)
        sent = ((self.world_size - 1) * sum(values, indices)).astype(float)
        return cast(Densities, sent if isinstance(density, np.ndarray) else float(sent))
