"""The message of one rank in one step: of fixed size, with a checksum, and refused as a whole if anything is wrong.

====================  =================================================================================================
header, 64 bytes      see :mod:`lightning_hetero.compression.message_header`
indices               below 10 % density: int32 blocks of each segment of 65 536, then a uint16 per block;
                      from 10 % on: one bit per block of the model
values                float32, bfloat16, or int8 and a bfloat16 scale per block
====================  =================================================================================================

Every part begins at a multiple of 16 bytes, which a GPU loads at once; unused slots are 0.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lightning_hetero.compression.message_header import (
    HEADER_BYTES,
    MESSAGE_KIND,
    NON_FINITE,
    Bytes,
    Checksum,
    Header,
    Words,
    address,
    checksum,
    foreign,
    refusal,
    seal,
)
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.value_codecs import CODECS, ValueCodec, aligned
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.message_size import MessageSize

__all__ = ["BITMAP_MIN_DENSITY", "SEGMENT_BLOCKS", "MessageFormat", "message_size"]

SEGMENT_BLOCKS = 65_536
"""Blocks of a segment, whose numbers within it have 16 bits."""

BITMAP_MIN_DENSITY = 0.10
"""Share of blocks at and above which indices are a bit per block of the model, not 16 bits per chosen block."""


@checked_keywords
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
        (432, False)
    """

    num_blocks: int
    k: int
    block: int
    value_dtype: str
    layout: int = 0

    @cached_property
    def bitmap(self) -> bool:
        """``True`` if indices are a bitmap."""
        return self.k >= BITMAP_MIN_DENSITY * self.num_blocks

    @cached_property
    def segments(self) -> int:
        """Segments of 65 536 blocks."""
        return -(-self.num_blocks // SEGMENT_BLOCKS)

    @cached_property
    def codec(self) -> ValueCodec:
        """The codec of values."""
        return CODECS[self.value_dtype]

    @cached_property
    def counts_bytes(self) -> int:
        """Bytes of the table of segments."""
        return 0 if self.bitmap else aligned(4 * self.segments)

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of indices, without the table of segments."""
        return aligned(-(-self.num_blocks // 8) if self.bitmap else 2 * self.k)

    @cached_property
    def places_at(self) -> int:
        """First byte of indices."""
        return HEADER_BYTES + self.counts_bytes

    @cached_property
    def values_at(self) -> int:
        """First byte of values."""
        return self.places_at + self.index_bytes

    @cached_property
    def parts_at(self) -> tuple[int, int]:
        """First byte of values, and of the last part of them: scales, if there are any."""
        return self.values_at, self.values_at + self.codec.spans(self.k, self.block)[-1][0]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return self.values_at + self.codec.num_bytes(self.k, self.block)

    @cached_property
    def positions(self) -> Words:
        """``1, 2, ...`` for each 32-bit word of the payload."""
        return np.arange(1, (self.num_bytes - HEADER_BYTES) // 4 + 1)

    @cached_property
    def fingerprint(self) -> int:
        """Number that sender and receiver must agree on."""
        return zlib.crc32(repr((self.num_blocks, self.k, self.block, self.value_dtype, self.layout)).encode())

    def value_parts(self, message: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Return views of the first ``count`` blocks in each part of the values."""
        parts = []
        for (dtype, per_block), (offset, length) in zip(
            self.codec.parts, self.codec.spans(self.k, self.block), strict=True
        ):
            begin = self.values_at + offset
            view = message[begin : begin + length].view(dtype)
            parts.append(view[:count] if per_block else view[: count * self.block].view(count, self.block))
        return tuple(parts)

    def index_views(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices (int16 to read as unsigned, or bytes of the bitmap) and the blocks of each segment."""
        places = message[self.places_at : self.values_at]
        counts = message[HEADER_BYTES : self.places_at].view(torch.int32)
        return (places if self.bitmap else places.view(torch.int16)), counts[: self.segments]

    # writing

    def write(
        self,
        message: torch.Tensor,
        indices: Words,
        blocks: torch.Tensor,
        *,
        bucket: int,
        step: int,
        rank: int = 0,
        flags: int = 0,
    ) -> torch.Tensor:
        """Write a message in place.

        Args:
            message: uint8, :attr:`num_bytes` long.
            indices: ascending int64, at most ``k``.
            blocks: their blocks, shape ``(len(indices), block)``.
            bucket: number of the message in the step.
            step: number of the step.
            rank: rank of the sender.
            flags: :data:`~lightning_hetero.compression.message_header.NON_FINITE` or 0.

        Returns:
            The blocks as receivers will read them.
        """
        count = len(indices)
        self.write_indices(message, indices)
        parts = self.value_parts(message, count)
        for part, values in zip(parts, self.codec.encode(blocks), strict=True):
            part.copy_(values)
        self.write_header(message, count, flags, place=address(rank, bucket), step=step)
        return self.codec.decode(parts)

    def write_indices(self, message: torch.Tensor, indices: Words) -> None:
        """Clear a message and write its indices, ascending int64, at most ``k``."""
        message.zero_()
        places, counts = self.index_views(message)
        if self.bitmap:
            bits = np.zeros(8 * len(places), dtype=bool)
            bits[indices] = True
            places.numpy()[:] = np.packbits(bits, bitorder="little")
        else:
            counts.numpy()[:] = np.bincount(indices // SEGMENT_BLOCKS, minlength=self.segments)
            places.numpy().view(np.uint16)[: len(indices)] = indices % SEGMENT_BLOCKS

    def write_header(
        self, message: torch.Tensor, count: int, flags: int, *, place: int, step: int, sums: Checksum = checksum
    ) -> None:
        """Write the header of a payload; ``place`` is an ``address``, and ``sums`` computes the checksum."""
        data = message.numpy()
        first, second = sums(data[HEADER_BYTES:], self.positions)
        fields = place, step, flags, count
        header = Header(MESSAGE_KIND, *fields, seal(first, fields), second, self.fingerprint)
        data[:HEADER_BYTES].view(np.int64)[:] = header

    # reading

    def gave_up(self, message: torch.Tensor) -> bool:
        """Return whether this rank's own message flags a gradient that is not finite; wait for the device."""
        return Header.of(message[:HEADER_BYTES].cpu().numpy()).flags == NON_FINITE

    def read(self, message: torch.Tensor, *, rank: int, bucket: int, step: int) -> tuple[Pack, int]:
        """Return pack and flags of a message.

        Raises:
            ValueError: if anything in it is wrong; the message names rank and bucket.
        """

        def refuse(what: str) -> ValueError:
            return refusal(what, rank=rank, bucket=bucket, step=step)

        wrong = self._foreign(message)
        if wrong:
            raise refuse(wrong)
        data = message.cpu().numpy()
        header = Header.of(data)
        wrong = self._wrong_header(header, data, rank=rank, bucket=bucket, step=step)
        if wrong:
            raise refuse(wrong)
        counts = data[HEADER_BYTES : self.places_at].view(np.int32)[: self.segments]
        if not self.bitmap and (int(counts.sum()) != header.blocks or int(counts.min()) < 0):
            raise refuse("its indices do not match its number of blocks")
        pack = self.unpack(message.cpu(), header.blocks)
        indices = pack.indices.numpy()
        if len(indices) != header.blocks:
            raise refuse("its indices do not match its number of blocks")
        if len(indices) and (int(indices[-1]) >= self.num_blocks or bool((np.diff(indices) <= 0).any())):
            raise refuse(f"its indices are not ascending numbers below {self.num_blocks}")
        if header.flags == 0 and not bool(torch.isfinite(pack.values).all()):
            raise refuse("it has values that are not finite")
        return pack, header.flags

    def _foreign(self, message: torch.Tensor) -> str:
        """Return why a tensor is not a message of this version and size, empty if it is one."""
        if message.dtype == torch.uint8 and message.numel() >= HEADER_BYTES:  # another version may have another size
            kind = int(message[:8].view(torch.int64))
            if kind != MESSAGE_KIND:
                return foreign(kind)
        if message.dtype != torch.uint8 or message.numel() != self.num_bytes:
            return f"it has {message.numel()} bytes of {message.dtype} where {self.num_bytes} are due"
        return ""

    def _wrong_header(self, header: Header, data: Bytes, *, rank: int, bucket: int, step: int) -> str:
        """Return the fault of a header, empty if there is none."""
        first, second = checksum(data[HEADER_BYTES:], self.positions)
        for got, due, what in (
            (header.fingerprint, self.fingerprint, "format fingerprint"),
            (divmod(header.address, 1 << 32), (rank, bucket), "sender and bucket"),
            (header.step, step, "step"),
            ([header.first_sum, header.second_sum], [seal(first, header.sealed_fields), second], "checksum"),
        ):
            if got != due:
                return f"{what} is {got}, not {due}"
        if not 0 <= header.blocks <= self.k or header.flags not in (0, NON_FINITE):
            allowed = f"where at most {self.k} blocks are allowed"
            return f"it names {header.blocks} blocks and flags {header.flags}, {allowed}"
        return ""

    def unpack(self, message: torch.Tensor, count: int | None = None) -> Pack:
        """Return the pack of a message on the host that is known to be valid."""
        data = message.numpy()
        number = Header.of(data).blocks if count is None else count
        places = data[self.places_at : self.values_at]
        if self.bitmap:
            indices = np.flatnonzero(np.unpackbits(places, bitorder="little"))
        else:
            counts = data[HEADER_BYTES : self.places_at].view(np.int32)[: self.segments]
            indices = np.repeat(np.arange(self.segments) * SEGMENT_BLOCKS, counts) + places.view(np.uint16)[:number]
        return Pack(torch.from_numpy(indices), self.codec.decode(self.value_parts(message, number)))


def message_size(num_blocks: int, block: int, value_dtype: str, world_size: int) -> MessageSize:
    """Return the size of the messages that a worker sends to all others, as a function of the density.

    Example:
        >>> message_size(1000, 16, "bfloat16", 2).bytes(0.02) == MessageFormat(1000, 10, 16, "bfloat16").num_bytes
        True
    """
    listed, marked = MessageFormat(num_blocks, 0, block, value_dtype), aligned(-(-num_blocks // 8))
    parts = tuple((1 if per_block else block) * dtype.itemsize for dtype, per_block in CODECS[value_dtype].parts)
    return MessageSize(num_blocks, world_size, parts, listed.places_at, HEADER_BYTES + marked, BITMAP_MIN_DENSITY)
