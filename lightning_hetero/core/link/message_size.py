"""Bytes of compressed gradients by density, as a value: a controller asks for them thousands of times in a decision."""

from dataclasses import dataclass

from lightning_hetero.core.compression.settings import blocks_per_rank

__all__ = ["MessageSize"]


@dataclass(frozen=True)
class MessageSize:
    """Bytes that a worker sends to all others in a step at a density, whatever the number of parameters.

    Args:
        num_blocks: blocks of the model.
        world_size: workers that exchange messages.
        parts: bytes of a block in each part of a message's values.
        listed: bytes besides indices and values where indices are listed, 2 bytes for each block.
        marked: bytes besides values where indices are a bitmap.
        marked_from: share of the blocks from which they are.
        align: bytes to multiples of which indices and parts are rounded up.

    Example:
        >>> size = MessageSize(1000, 2, parts=(32,), listed=80, marked=192)
        >>> size(0.02), size(1.0)
        (432.0, 32192.0)
    """

    num_blocks: int
    world_size: int
    parts: tuple[int, ...]
    listed: int
    marked: int
    marked_from: float = 0.1
    align: int = 16

    def __call__(self, density: float) -> float:
        """Bytes at a density, above 0, to 1."""
        k = blocks_per_rank(self.num_blocks, density, self.world_size)
        values = sum(self._rounded(k * part) for part in self.parts)
        marked = k >= self.marked_from * self.num_blocks
        return float((self.world_size - 1) * (values + (self.marked if marked else self.listed + self._rounded(2 * k))))

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.align) * self.align
