"""Values of blocks on the wire: float32, bfloat16, or int8 with one bfloat16 scale per block.

``decode(encode(v))`` is what the receivers add; ``v - decode(encode(v))`` returns to the residual. In float32 that
difference is exact, so rounding loses nothing (``tests/kernels/test_messages.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["CODECS", "ValueCodec", "aligned"]

Parts = tuple[torch.Tensor, ...]


def aligned(num_bytes: int) -> int:
    """Return the next multiple of 16 bytes, the widest load of a GPU.

    Example:
        >>> aligned(33)
        48
    """
    return -(-num_bytes // 16) * 16


@dataclass(frozen=True)
class ValueCodec:
    """One type of values.

    Args:
        name: as in :data:`~lightning_hetero.core.compression.settings.VALUE_DTYPES`.
        parts: dtype of each part of the message, and whether it has one entry per block instead of one per element.
        encode: converts blocks, shape ``(k, block)``, to parts.
        decode: converts parts to float32 blocks.
    """

    name: str
    parts: tuple[tuple[torch.dtype, bool], ...]
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts], torch.Tensor]

    def num_bytes(self, k: int, block: int) -> int:
        """Return the bytes of ``k`` blocks, each part rounded up to 16 bytes.

        Example:
            >>> CODECS["bfloat16"].num_bytes(3, 16)
            96
        """
        return sum(length for _, length in self.spans(k, block))

    def spans(self, k: int, block: int) -> list[tuple[int, int]]:
        """Return offset and length in bytes of each part."""
        spans, offset = [], 0
        for dtype, per_block in self.parts:
            length = aligned(k * (1 if per_block else block) * dtype.itemsize)
            spans.append((offset, length))
            offset += length
        return spans


LARGEST_FLOAT32 = torch.finfo(torch.float32).max
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
LARGEST_INT8 = torch.iinfo(torch.int8).max
ROUNDING_TERM = 1.5 * 2**23
"""Adding it to a float32 and subtracting it again rounds to the nearest even integer."""


def _to_bf16(blocks: torch.Tensor) -> Parts:
    """Return the nearest bfloat16, never infinite: the excess over its range stays in the residual."""
    return (blocks.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16).to(torch.bfloat16),)


def _to_int8(blocks: torch.Tensor) -> Parts:
    """Return ``q = round(v / scale)`` with ``scale = max |v| / 127`` in bfloat16; 0 where a scale is too small."""
    scale = (blocks.abs().amax(dim=1) / LARGEST_INT8).to(torch.bfloat16)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).to(blocks.dtype)
    q = (blocks / divisor[:, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return torch.where(scale[:, None] > 0, q, torch.zeros_like(q)).to(torch.int8), scale


def _from_int8(parts: Parts) -> torch.Tensor:
    q, scale = parts
    return q.to(torch.float32).mul_(scale.to(torch.float32)[:, None])


CODECS = {
    "float32": ValueCodec("float32", ((torch.float32, False),), lambda v: (v.to(torch.float32),), lambda p: p[0]),
    "bfloat16": ValueCodec("bfloat16", ((torch.bfloat16, False),), _to_bf16, lambda p: p[0].to(torch.float32)),
    "int8": ValueCodec("int8", ((torch.int8, False), (torch.bfloat16, True)), _to_int8, _from_int8),
}
