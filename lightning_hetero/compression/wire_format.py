"""The message of one rank in one step: fixed size, header with checksum, refused as a whole if anything is wrong.

====================  =================================================================================================
header, 64 bytes      magic and version; sender and bucket; step; flags; blocks; two sums of the payload; fingerprint
indices               below 10 % density: int32 blocks of each segment of 65 536, then a uint16 per block;
                      from 10 % on: one bit per block of the model
values                float32, bfloat16, or int8 and a bfloat16 scale per block
====================  =================================================================================================

Every part begins at a multiple of 16 bytes, which a GPU loads at once; unused slots are 0. The sums are those of
Fletcher's checksum over 32-bit words, modulo 2^64, which can be taken on any device.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.value_codecs import CODECS, ValueCodec, aligned
from lightning_hetero.core.link.message_size import MessageSize

__all__ = ["NON_FINITE", "MessageFormat", "address", "checksum", "foreign", "message_size", "refusal"]

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int64]

HEADER = 64
MAGIC = 0x4C48424B << 8
VERSION = 3
SEGMENT = 65_536
BITMAP_FROM = 0.10
SEALS = (0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
NON_FINITE = 1
"""Flag: the sender's gradient was not finite, so that all ranks leave the step out."""


def address(rank: int, bucket: int) -> int:
    """Sender and bucket as one field: a message in another rank's row is refused.

    Example:
        >>> hex(address(3, 1))
        '0x300000001'
    """
    return rank << 32 | bucket


def checksum(payload: Bytes, positions: Words) -> tuple[int, int]:
    """``(sum w_i, sum (i + 1) w_i)`` of the 32-bit words, modulo 2^64, as signed numbers.

    Example:
        >>> checksum(np.array([1, 0, 0, 0, 2, 0, 0, 0], dtype=np.uint8), np.arange(1, 3))
        (3, 5)
    """
    words = payload.view(np.int32).astype(np.int64)
    return int(words.sum()), int((words * positions).sum())


def seal(first: int, fields: Iterable[int]) -> int:
    """The first sum with address, step, flags and number of blocks in it, so that it covers the header as well.

    Example:
        >>> seal(5, [0, 0, 0, 0])
        5
    """
    total = first + sum(weight * field for weight, field in zip(SEALS, fields, strict=True))
    return (total + 2**63) % 2**64 - 2**63


def refusal(what: str, *, rank: int, bucket: int, step: int) -> ValueError:
    """The error of a malformed message."""
    return ValueError(
        f"the gradient message of rank {rank}, bucket {bucket}, step {step} is refused: {what}. Nothing of it was "
        "applied. Check that all ranks run the same code and settings, and the link between them."
    )


def foreign(kind: int) -> str:
    """What is wrong with the first field of a header that is not of this version.

    Example:
        >>> foreign(MAGIC | 2)
        'it is in version 2 of the message format, not 3; install the same version of lightning-hetero on all ranks'
    """
    if kind >> 8 != MAGIC >> 8:
        return "it is no message of this program: magic and version differ"
    return (
        f"it is in version {kind & 0xFF} of the message format, not {VERSION}; install the same version of "
        "lightning-hetero on all ranks"
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
        (432, False)
    """

    num_blocks: int
    k: int
    block: int
    value_dtype: str
    layout: int = 0

    @cached_property
    def bitmap(self) -> bool:
        """Whether indices are a bitmap."""
        return self.k >= BITMAP_FROM * self.num_blocks

    @cached_property
    def segments(self) -> int:
        """Segments of 65 536 blocks."""
        return -(-self.num_blocks // SEGMENT)

    @cached_property
    def codec(self) -> ValueCodec:
        """How values are written."""
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
    def values_at(self) -> int:
        """Where values begin."""
        return HEADER + self.counts_bytes + self.index_bytes

    @cached_property
    def parts_at(self) -> tuple[int, int]:
        """Where values begin, and where the last part of them does, scales if there are any."""
        return self.values_at, self.values_at + self.codec.spans(self.k, self.block)[-1][0]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return self.values_at + self.codec.num_bytes(self.k, self.block)

    @cached_property
    def positions(self) -> Words:
        """``1, 2, ...`` for each 32-bit word of the payload."""
        return np.arange(1, (self.num_bytes - HEADER) // 4 + 1)

    @cached_property
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
            rank: of the sender.
            flags: :data:`NON_FINITE` or 0.

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

    def write_header(
        self, message: torch.Tensor, count: int, flags: int, *, place: int, step: int, sums: Any = checksum
    ) -> None:
        """Write the header over a payload; ``place`` is an :func:`address`, ``sums`` what takes the checksum."""
        data = message.numpy()
        first, second = sums(data[HEADER:], self.positions)
        fields = place, step, flags, count
        data[:HEADER].view(np.int64)[:] = (MAGIC | VERSION, *fields, seal(first, fields), second, self.fingerprint)

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

        wrong = self._foreign(message)
        if wrong:
            raise refuse(wrong)
        data = message.cpu().numpy()
        _, place, its_step, flags, count, *sums, fingerprint = data[:HEADER].view(np.int64).tolist()
        first, second = checksum(data[HEADER:], self.positions)
        due_sums = [seal(first, (place, its_step, flags, count)), second]
        for got, due, what in (
            (fingerprint, self.fingerprint, "format fingerprint"),
            (divmod(place, 1 << 32), (rank, bucket), "sender and bucket"),
            (its_step, step, "step"),
            (sums, due_sums, "checksum"),
        ):
            if got != due:
                raise refuse(f"{what} is {got}, not {due}")
        if not 0 <= count <= self.k or flags not in (0, NON_FINITE):
            raise refuse(f"it names {count} blocks and flags {flags}, where at most {self.k} blocks are allowed")
        counts = data[HEADER : HEADER + self.counts_bytes].view(np.int32)[: self.segments]
        if not self.bitmap and (int(counts.sum()) != count or int(counts.min()) < 0):
            raise refuse("its indices do not match its number of blocks")
        pack = self.unpack(message.cpu(), count)
        indices = pack.indices.numpy()
        if len(indices) != count:
            raise refuse("its indices do not match its number of blocks")
        if count and (int(indices[-1]) >= self.num_blocks or bool((np.diff(indices) <= 0).any())):
            raise refuse(f"its indices are not ascending numbers below {self.num_blocks}")
        if flags == 0 and not bool(torch.isfinite(pack.values).all()):
            raise refuse("it has values that are not finite")
        return pack, flags

    def _foreign(self, message: torch.Tensor) -> str:
        """Why something is no message of this version and size, empty if it is one."""
        if message.dtype == torch.uint8 and message.numel() >= HEADER:  # another version may well have another size
            kind = int(message[:8].view(torch.int64))
            if kind != MAGIC | VERSION:
                return foreign(kind)
        if message.dtype != torch.uint8 or message.numel() != self.num_bytes:
            return f"it has {message.numel()} bytes of {message.dtype} where {self.num_bytes} are due"
        return ""

    def unpack(self, message: torch.Tensor, count: int | None = None) -> Pack:
        """Pack of a message on the host that is known to be in order."""
        data = message.numpy()
        number = int(data[:HEADER].view(np.int64)[4]) if count is None else count
        places = data[HEADER + self.counts_bytes : self.values_at]
        if self.bitmap:
            indices = np.flatnonzero(np.unpackbits(places, bitorder="little"))
        else:
            counts = data[HEADER : HEADER + self.counts_bytes].view(np.int32)[: self.segments]
            indices = np.repeat(np.arange(self.segments) * SEGMENT, counts) + places.view(np.uint16)[:number]
        return Pack(torch.from_numpy(indices), self.codec.decode(self.value_parts(message, number)))


def message_size(num_blocks: int, block: int, value_dtype: str, world_size: int) -> MessageSize:
    """What a worker sends to all others at a density, with no message at hand.

    Example:
        >>> message_size(1000, 16, "bfloat16", 2)(0.02) == MessageFormat(1000, 10, 16, "bfloat16").num_bytes
        True
    """
    listed, marked = MessageFormat(num_blocks, 0, block, value_dtype), aligned(-(-num_blocks // 8))
    parts = tuple((1 if per_block else block) * dtype.itemsize for dtype, per_block in CODECS[value_dtype].parts)
    return MessageSize(num_blocks, world_size, parts, HEADER + listed.counts_bytes, HEADER + marked, BITMAP_FROM)
