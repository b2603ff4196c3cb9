"""The message of one rank in one step: fixed size, header with checksum, refused as a whole if anything is wrong.

====================  ==========================================================================================
header, 64 bytes      magic and version; bucket; step; flags; blocks; two sums of the payload; fingerprint
indices               below 10 % density: int32 blocks of each segment of 65 536, then a uint16 per block;
                      from 10 % on: one bit per block of the model
values                float32, bfloat16, or int8 and a bfloat16 scale per block
====================  ==========================================================================================

Every part begins at a multiple of 8 bytes; unused slots are 0. The sums are those of Fletcher's checksum over 32-bit
words, modulo 2^64, which can be taken on any device.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.values import CODECS, ValueCodec

__all__ = ["NON_FINITE", "MessageFormat", "checksum", "refusal"]

HEADER = 64
MAGIC = 0x4C48424B << 8
VERSION = 1
SEGMENT = 65_536
BITMAP_FROM = 0.10
SEALS = (0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
NON_FINITE = 1
"""Flag: the sender's gradient was not finite, so that all ranks leave the step out."""


def checksum(payload: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sum w_i, sum (i + 1) w_i)`` of the 32-bit words, modulo 2^64.

    Example:
        >>> sums = checksum(torch.tensor([1, 0, 0, 0, 2, 0, 0, 0], dtype=torch.uint8), torch.arange(1, 3))
        >>> [int(s) for s in sums]
        [3, 5]
    """
    words = payload.view(torch.int32).to(torch.int64)
    return words.sum(), (words * positions).sum()


def seal(first: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
    """The first sum with bucket, step, flags and number of blocks in it, so that it covers the header as well.

    Example:
        >>> int(seal(torch.tensor(5), torch.tensor([0, 0, 0, 0])))
        5
    """
    weights = torch.tensor(SEALS, dtype=torch.int64, device=fields.device)
    return first + (weights * fields).sum()


def refusal(what: str, *, rank: int, bucket: int, step: int) -> ValueError:
    """The error of a malformed message."""
    return ValueError(
        f"the gradient message of rank {rank}, bucket {bucket}, step {step} is refused: {what}. Nothing of it was "
        "applied. Check that all ranks run the same code and settings, and the link between them."
    )


@dataclass(frozen=True)
class MessageFormat:
    """Sizes and places of everything in a message.

    Args:
        num_blocks: blocks of the model.
        k: most blocks of a message.
        block: elements of a block.
        value_dtype: type of values.
        layout: fingerprint of the parameters' layout.

    Example:
        >>> form = MessageFormat(num_blocks=1000, k=10, block=16, value_dtype="bfloat16")
        >>> form.num_bytes, form.bitmap
        (416, False)
    """

    num_blocks: int
    k: int
    block: int
    value_dtype: str
    layout: int = 0

    @property
    def bitmap(self) -> bool:
        """Whether indices are a bitmap."""
        return self.k >= BITMAP_FROM * self.num_blocks

    @property
    def segments(self) -> int:
        """Segments of 65 536 blocks."""
        return -(-self.num_blocks // SEGMENT)

    @cached_property
    def codec(self) -> ValueCodec:
        """How values are written."""
        return CODECS[self.value_dtype]

    @property
    def counts_bytes(self) -> int:
        """Bytes of the table of segments."""
        return 0 if self.bitmap else -(-4 * self.segments // 8) * 8

    @property
    def index_bytes(self) -> int:
        """Bytes of indices, without the table of segments."""
        return -(-(-(-self.num_blocks // 8) if self.bitmap else 2 * self.k) // 8) * 8

    @property
    def values_at(self) -> int:
        """Where values begin."""
        return HEADER + self.counts_bytes + self.index_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return self.values_at + self.codec.num_bytes(self.k, self.block)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``1, 2, ...`` for each 32-bit word of the payload."""
        return torch.arange(1, (self.num_bytes - HEADER) // 4 + 1)

    @property
    def fingerprint(self) -> int:
        """What sender and receiver must agree on."""
        return zlib.crc32(repr((self.num_blocks, self.k, self.block, self.value_dtype, self.layout)).encode())

    def value_parts(self, message: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Views of the first ``count`` blocks in each part of the values."""
        parts = []
        for (dtype, per_block), (offset, length) in zip(
            self.codec.parts, self.codec.spans(self.k, self.block), strict=True
        ):
            begin = self.values_at + offset
            view = message[begin : begin + length].view(dtype)
            parts.append(view[:count] if per_block else view[: count * self.block].view(count, self.block))
        return tuple(parts)

    def index_views(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices, int16 to be read without sign or the bytes of the bitmap, and blocks of each segment."""
        places = message[HEADER + self.counts_bytes : self.values_at]
        counts = message[HEADER : HEADER + self.counts_bytes].view(torch.int32)
        return (places if self.bitmap else places.view(torch.int16)), counts[: self.segments]

    def write(
        self,
        message: torch.Tensor,
        indices: np.ndarray,
        blocks: torch.Tensor,
        *,
        bucket: int,
        step: int,
        flags: int = 0,
    ) -> torch.Tensor:
        """Write a message in place.

        Args:
            message: uint8, :attr:`num_bytes` long.
            indices: ascending int64, at most ``k``.
            blocks: their blocks, shape ``(len(indices), block)``.
            bucket: number of the message in the step.
            step: number of the step.
            flags: :data:`NON_FINITE` or 0.

        Returns:
            The blocks as receivers will read them.
        """
        count = len(indices)
        self.write_indices(message, indices)
        parts = self.value_parts(message, count)
        for part, values in zip(parts, self.codec.encode(blocks), strict=True):
            part.copy_(values)
        self.write_header(message, count, flags, bucket=bucket, step=step)
        return self.codec.decode(parts)

    def write_indices(self, message: torch.Tensor, indices: np.ndarray) -> None:
        """Clear a message and write its indices, ascending int64, at most ``k``."""
        message.zero_()
        places, counts = self.index_views(message)
        if self.bitmap:
            bits = np.zeros(8 * len(places), dtype=bool)
            bits[indices] = True
            places.numpy()[:] = np.packbits(bits, bitorder="little")
        else:
            counts.numpy()[:] = np.bincount(indices // SEGMENT, minlength=self.segments)
            places.numpy().view(np.uint16)[: len(indices)] = indices % SEGMENT

    def write_header(self, message: torch.Tensor, count: int, flags: int, *, bucket: int, step: int) -> None:
        """Write the header over a payload."""
        header = message[:HEADER].view(torch.int64)
        first, second = checksum(message[HEADER:], self.positions)
        fields: tuple[Any, ...] = (MAGIC | VERSION, bucket, step, flags, count, first, second, self.fingerprint)
        for place, value in enumerate(fields):
            header[place] = value
        header[5] = seal(first, header[1:5])

    def gave_up(self, message: torch.Tensor) -> bool:
        """Whether a message of this rank's own says that its gradient was not finite; waits for the device."""
        return int(message[:HEADER].view(torch.int64)[3]) == NON_FINITE

    def read(self, message: torch.Tensor, *, rank: int, bucket: int, step: int) -> tuple[Pack, int]:
        """Pack and flags of a message.

        Raises:
            ValueError: naming rank and bucket, if anything in it is wrong.
        """

        def refuse(what: str) -> ValueError:
            return refusal(what, rank=rank, bucket=bucket, step=step)

        if message.dtype != torch.uint8 or message.numel() != self.num_bytes:
            raise refuse(f"it has {message.numel()} bytes of {message.dtype} where {self.num_bytes} are due")
        header = message[:HEADER].view(torch.int64)
        first, second = checksum(message[HEADER:], self.positions.to(message.device))
        kind, its_bucket, its_step, flags, count, *sums, fingerprint, due_first, due_second = torch.cat(
            [header, torch.stack([seal(first, header[1:5]), second])]
        ).tolist()
        for got, due, what in (
            (kind, MAGIC | VERSION, "magic and version"),
            (fingerprint, self.fingerprint, "format fingerprint"),
            (its_bucket, bucket, "bucket"),
            (its_step, step, "step"),
            (sums, [due_first, due_second], "checksum"),
        ):
            if got != due:
                raise refuse(f"{what} is {got}, not {due}")
        if not 0 <= count <= self.k or flags not in (0, NON_FINITE):
            raise refuse(f"it names {count} blocks and flags {flags}, where at most {self.k} blocks are allowed")
        _, counts = self.index_views(message)
        if not self.bitmap and (int(counts.sum()) != count or int(counts.min()) < 0):
            raise refuse("its indices do not match its number of blocks")
        pack = self.unpack(message, count)
        if len(pack.indices) != count:
            raise refuse("its indices do not match its number of blocks")
        if count and (int(pack.indices[-1]) >= self.num_blocks or bool((pack.indices.diff() <= 0).any())):
            raise refuse(f"its indices are not ascending numbers below {self.num_blocks}")
        if flags == 0 and not bool(torch.isfinite(pack.values).all()):
            raise refuse("it has values that are not finite")
        return pack, flags

    def unpack(self, message: torch.Tensor, count: int | None = None) -> Pack:
        """Pack of a message that is known to be in order."""
        places, counts = self.index_views(message)
        number = int(message[:HEADER].view(torch.int64)[4]) if count is None else count
        if self.bitmap:
            bits = places[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=message.device)) & 1
            indices = bits.view(-1).nonzero().view(-1)
        else:
            base = torch.arange(self.segments, device=message.device) * SEGMENT
            indices = base.repeat_interleave(counts.long(), output_size=number) + (places[:number].long() & 0xFFFF)
        return Pack(indices, self.codec.decode(self.value_parts(message, number)))
