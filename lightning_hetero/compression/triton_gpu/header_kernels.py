"""Triton kernels of message headers: sums of the payload, the header of this rank, and the check of all others.

=============  ===================================================================================================
kernel         what it does
=============  ===================================================================================================
``word_sums``  both sums of each message's payload
``seal``       the header of this rank's message
``prefix``     prefix sums of small tables, for segments, bitmaps and tiles
``inspect``    compares the header of each message with the expected one, and writes faults to the status
=============  ===================================================================================================

The format is :mod:`lightning_hetero.compression.wire_format`'s, and the status that of
:mod:`lightning_hetero.compression.triton_gpu.status`. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.compression.message_header import HEADER_BYTES, HEADER_WEIGHTS, MESSAGE_KIND
from lightning_hetero.compression.triton_gpu import status

__all__ = ["inspect", "prefix", "seal", "word_sums"]

# Kernels read globals of their module only, and those only as constexpr.
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 4)
KIND = tl.constexpr(MESSAGE_KIND)
VERSION_SHIFT = tl.constexpr(status.VERSION_SHIFT)
WEIGHT_0, WEIGHT_1, WEIGHT_2, WEIGHT_3 = map(tl.constexpr, HEADER_WEIGHTS)


@triton.jit
def _row(pointer, number, stride):
    """Return a pointer to a row, of rows ``stride`` times 16 bytes apart, the size that a GPU loads at once."""
    # In 64 bits, because the rows of a large message lie further apart than 32 bits can count.
    return pointer + (tl.full((), 0, tl.int64) + number) * stride * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit(do_not_specialize=["units", "stride"])
def word_sums(words_ptr, sums_ptr, units, stride, TILE: tl.constexpr, ITERS: tl.constexpr):
    """Add ``(sum w_i, sum (i + 1) w_i)`` of each row's payload of 32-bit words to ``sums``.

    Args:
        words_ptr: first row.
        sums_ptr: int64, two for each row.
        units: units of 16 bytes, four words each, in a payload.
        stride: distance from one row to the next, in units.
        TILE: words that are processed at once.
        ITERS: tiles of a program.
    """
    peer = tl.program_id(1)
    begin = tl.program_id(0).to(tl.int64) * (ITERS * TILE // 4)
    left = tl.minimum(units - begin, ITERS * TILE // 4).to(tl.int32) * 4
    base = _row(words_ptr, peer, stride) + HEADER_WORDS + 4 * begin
    first = tl.zeros((TILE,), tl.int64)
    second = tl.zeros((TILE,), tl.int64)
    for it in range(ITERS):
        at = it * TILE + tl.arange(0, TILE)
        word = tl.load(base + at, mask=at < left, other=0).to(tl.int64)
        first += word
        second += word * (at + 1)
    total = tl.sum(first, axis=0)
    tl.atomic_add(sums_ptr + 2 * peer, total)
    # Words are numbered from the start of this program's part; the last term corrects for that.
    tl.atomic_add(sums_ptr + 2 * peer + 1, tl.sum(second, axis=0) + 4 * begin * total)


@triton.jit
def _address(rank, bucket):
    """Return sender and bucket as one word."""
    wide = tl.full((), 0, tl.int64)
    return ((wide + rank) << 32) | (wide + bucket)


@triton.jit
def _unsigned(number):
    """Return a 32-bit number as unsigned, in 64 bits."""
    return (tl.full((), 0, tl.int64) + number) & 0xFFFFFFFF


@triton.jit
def _sealed(first, place, step, flags, number):
    """Return the first sum with the fields of the header added, all in 64 bits."""
    wide = tl.full((), 0, tl.int64)
    total = first + (wide + WEIGHT_0) * (wide + place) + (wide + WEIGHT_1) * (wide + step)
    return total + (wide + WEIGHT_2) * (wide + flags) + (wide + WEIGHT_3) * (wide + number)


@triton.jit(do_not_specialize=["tiles", "k", "rank", "bucket", "step", "fingerprint"])
def seal(header_ptr, sums_ptr, plan_ptr, above_ptr, edge_ptr, tiles, k, rank, bucket, step, fingerprint):
    """Write the header over a payload, and clear its sums.

    Args:
        header_ptr: header, eight int64 words.
        sums_ptr: result of ``word_sums``.
        plan_ptr: result of ``pick``.
        above_ptr: prefix sums over tiles of the blocks above the edge bin.
        edge_ptr: the same for the edge bin.
        tiles: number of tiles.
        k: budget.
        rank: rank of the sender.
        bucket: number of the message in the step.
        step: number of the step.
        fingerprint: fingerprint of the format as a signed 32-bit number, so that its type never changes.
    """
    in_edge = tl.minimum(tl.load(edge_ptr + tiles - 1), tl.load(plan_ptr + 3))
    number = tl.minimum(tl.load(above_ptr + tiles - 1) + in_edge, k).to(tl.int64)
    flags = tl.load(plan_ptr + 4).to(tl.int64)
    tl.store(header_ptr, KIND)
    tl.store(header_ptr + 1, _address(rank, bucket))
    tl.store(header_ptr + 2, step)
    tl.store(header_ptr + 3, flags)
    tl.store(header_ptr + 4, number)
    tl.store(header_ptr + 5, _sealed(tl.load(sums_ptr), _address(rank, bucket), step, flags, number))
    tl.store(header_ptr + 6, tl.load(sums_ptr + 1))
    tl.store(header_ptr + 7, _unsigned(fingerprint))
    tl.store(sums_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int64))


@triton.jit(do_not_specialize=["length", "stride"])
def prefix(counts_ptr, ends_ptr, length, stride, TILE: tl.constexpr):
    """Write inclusive prefix sums of each row of ``length`` counts, which begin ``stride`` times 16 bytes apart."""
    row = tl.program_id(0).to(tl.int64)
    counts_ptr = _row(counts_ptr, row, stride)
    carry = tl.full((), 0, tl.int32)
    for begin in range(0, length, TILE):
        at = begin + tl.arange(0, TILE)
        counts = tl.load(counts_ptr + at, mask=at < length, other=0)
        tl.store(ends_ptr + row * length + at, tl.cumsum(counts, axis=0) + carry, mask=at < length)
        carry += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["stride", "counts_stride", "length", "k", "world", "bucket", "step", "fingerprint"])
def inspect(
    header_ptr, sums_ptr, counts_ptr, ends_ptr, status_ptr, stride, counts_stride, length, k, world, bucket, step,
    fingerprint, TILE: tl.constexpr,
):  # fmt: skip
    """Write the faults in the header and the index table of each message to the status; clear the sums.

    Args:
        header_ptr: int64, first row's header.
        sums_ptr: result of ``word_sums`` for each row.
        counts_ptr: blocks of each segment, or of each tile of the bitmap.
        ends_ptr: their prefix sums.
        status_ptr: receives code, blocks and flags of each row.
        stride: distance from one row's header to the next, in units of 16 bytes.
        counts_stride: distance from one row of counts to the next, in units of 16 bytes.
        length: number of counts in a row.
        k: most blocks of a message.
        world: number of rows.
        bucket: expected bucket.
        step: expected step.
        fingerprint: expected fingerprint, as a signed 32-bit number.
        TILE: counts that are processed at once.
    """
    peer = tl.program_id(0)
    header = _row(header_ptr, peer, stride)
    counts_ptr = _row(counts_ptr, peer, counts_stride)
    flags = tl.load(header + 3)
    number = tl.load(header + 4)
    first = _sealed(tl.load(sums_ptr + 2 * peer), tl.load(header + 1), tl.load(header + 2), flags, number)
    intact = (tl.load(header + 5) == first) & (tl.load(header + 6) == tl.load(sums_ptr + 2 * peer + 1))
    tl.store(sums_ptr + 2 * peer + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    least = tl.full((), 0, tl.int32)
    for begin in range(0, length, TILE):
        at = begin + tl.arange(0, TILE)
        counts = tl.load(counts_ptr + at, mask=at < length, other=0)
        least = tl.minimum(least, tl.min(counts, axis=0))
    fitting = (tl.load(ends_ptr + peer.to(tl.int64) * length + length - 1) == number) & (least >= 0)
    allowed = (number >= 0) & (number <= k) & ((flags == 0) | (flags == 1))
    kind = tl.load(header)
    its_version = tl.where(kind >> 8 == KIND >> 8, kind & 0xFF, 0).to(tl.int32)
    code = tl.where(kind == KIND, 0, 1 + (its_version << VERSION_SHIFT))  # bits as in ``status.FAULTS``
    code += tl.where(tl.load(header + 7) == _unsigned(fingerprint), 0, 2)
    code += tl.where(tl.load(header + 1) == _address(peer, bucket), 0, 4)
    code += tl.where(tl.load(header + 2) == step, 0, 8)
    code += tl.where(intact, 0, 16)
    code += tl.where(allowed, 0, 32)
    code += tl.where(fitting, 0, 64)
    tl.store(status_ptr + peer, code)
    tl.store(status_ptr + world + peer, tl.where(code == 0, number, 0).to(tl.int32))
    tl.store(status_ptr + 2 * world + peer, tl.where(code == 0, flags, 0).to(tl.int32))
