"""Triton kernels of what arrives: messages are checked and decided on by the device; the host never waits.

=============  ===================================================================================================
kernel         what it does
=============  ===================================================================================================
``word_sums``  both sums of each message's payload
``seal``       the header of this rank's message
``prefix``     prefix sums of small tables, for segments, bitmaps and tiles
``inspect``    the header of each message against what is due; writes what is wrong into the status
``expand``     numbers of the blocks from segments; ``tally`` and ``spread`` from a bitmap
``check``      ascending numbers within the model, finite values
``decide``     one verdict for all messages: 0 merge, 1 a gradient was not finite, 2 a message is malformed
=============  ===================================================================================================

What a verdict leads to is in :mod:`lightning_hetero.compression.triton_gpu.apply_kernels`. The status of a step is
``(code, blocks, flags)`` of each rank, each in a row of its own, then the verdict; codes are those of :data:`FAULTS`,
with the version of a message in another one above them (:data:`VERSION_AT`). The format is
:mod:`lightning_hetero.compression.wire_format`'s. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.compression.message_header import HEADER_BYTES, HEADER_WEIGHTS, MESSAGE_KIND
from lightning_hetero.compression.wire_format import SEGMENT_BLOCKS

__all__ = [
    "FAULTS",
    "VERSION_AT",
    "check",
    "decide",
    "expand",
    "inspect",
    "prefix",
    "seal",
    "spread",
    "tally",
    "word_sums",
]

FAULTS = {
    1: "magic or version differs",
    2: "format fingerprint differs",
    4: "sender or bucket differs",
    8: "step differs",
    16: "checksum does not match",
    32: "its number of blocks or its flags are not allowed",
    64: "its indices do not match its number of blocks",
    128: "its indices are not ascending numbers of the model's blocks",
    256: "it has values that are not finite",
}
"""What is wrong with a message, by bit of its code."""

VERSION_AT = 16
"""Bits below the version of a message in its code."""

AT = tl.constexpr(VERSION_AT)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 4)
KIND = tl.constexpr(MESSAGE_KIND)
WEIGHT_0, WEIGHT_1, WEIGHT_2, WEIGHT_3 = map(tl.constexpr, HEADER_WEIGHTS)
IN_SEGMENT = tl.constexpr(SEGMENT_BLOCKS)
LARGEST = tl.constexpr(3.4028234663852886e38)
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _row(pointer, number, stride):
    """Where a row begins whose rows are ``stride`` times 16 bytes apart, which is what a GPU loads at once."""
    return pointer + (tl.full((), 0, tl.int64) + number) * stride * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit(do_not_specialize=["units", "stride"])
def word_sums(words_ptr, sums_ptr, units, stride, TILE: tl.constexpr, ITERS: tl.constexpr):
    """``(sum w_i, sum (i + 1) w_i)`` of each row's payload of 32-bit words, added to ``sums``.

    Args:
        words_ptr: first row.
        sums_ptr: int64, two for each row.
        units: 16 bytes of a payload, four words each.
        stride: from one row to the next, in units.
        TILE: words that are worked on at once.
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
    tl.atomic_add(sums_ptr + 2 * peer + 1, tl.sum(second, axis=0) + 4 * begin * total)


@triton.jit
def _address(rank, bucket):
    """Sender and bucket as one field."""
    wide = tl.full((), 0, tl.int64)
    return ((wide + rank) << 32) | (wide + bucket)


@triton.jit
def _unsigned(number):
    """32 bits without their sign."""
    return (tl.full((), 0, tl.int64) + number) & 0xFFFFFFFF


@triton.jit
def _sealed(first, place, step, flags, number):
    """The first sum with the fields of the header in it, all of them 64 bits wide."""
    wide = tl.full((), 0, tl.int64)
    total = first + (wide + WEIGHT_0) * (wide + place) + (wide + WEIGHT_1) * (wide + step)
    return total + (wide + WEIGHT_2) * (wide + flags) + (wide + WEIGHT_3) * (wide + number)


@triton.jit(do_not_specialize=["tiles", "k", "rank", "bucket", "step", "fingerprint"])
def seal(header_ptr, sums_ptr, plan_ptr, above_ptr, edge_ptr, tiles, k, rank, bucket, step, fingerprint):
    """Write the header over a payload, and clear its sums.

    Args:
        header_ptr: int64, eight of them.
        sums_ptr: what ``word_sums`` found.
        plan_ptr: what ``pick`` found.
        above_ptr: prefix sums over tiles of the blocks above the edge bin.
        edge_ptr: the same for the edge bin.
        tiles: number of tiles.
        k: budget.
        rank: of the sender.
        bucket: number of the message in the step.
        step: number of the step.
        fingerprint: of the format, 32 bits with a sign, so that its type does not depend on it.
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
    """Inclusive prefix sums of each row of ``length`` counts; these rows begin ``stride`` times 16 bytes apart."""
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
    """What is wrong with the header and the index table of each message; clears the sums.

    Args:
        header_ptr: int64, first row's header.
        sums_ptr: what ``word_sums`` found of each row.
        counts_ptr: blocks of each segment, or of each tile of the bitmap.
        ends_ptr: their prefix sums.
        status_ptr: receives code, blocks and flags of each row.
        stride: from one row's header to the next, in 16 bytes.
        counts_stride: from one row of counts to the next, in 16 bytes.
        length: counts of a row.
        k: most blocks of a message.
        world: number of rows.
        bucket: that is due.
        step: that is due.
        fingerprint: that is due, 32 bits with a sign.
        TILE: counts that are worked on at once.
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
    code = tl.where(kind == KIND, 0, 1 + (its_version << AT))
    code += tl.where(tl.load(header + 7) == _unsigned(fingerprint), 0, 2)
    code += tl.where(tl.load(header + 1) == _address(peer, bucket), 0, 4)
    code += tl.where(tl.load(header + 2) == step, 0, 8)
    code += tl.where(intact, 0, 16)
    code += tl.where(allowed, 0, 32)
    code += tl.where(fitting, 0, 64)
    tl.store(status_ptr + peer, code)
    tl.store(status_ptr + world + peer, tl.where(code == 0, number, 0).to(tl.int32))
    tl.store(status_ptr + 2 * world + peer, tl.where(code == 0, flags, 0).to(tl.int32))


@triton.jit(do_not_specialize=["stride", "pitch", "segments", "steps", "k", "world"])
def expand(places_ptr, ends_ptr, status_ptr, numbers_ptr, stride, pitch, segments, steps, k, world, TILE: tl.constexpr):
    """Numbers of each message's blocks, -1 in empty slots: the segment by bisection of the prefix sums, plus the place.

    Args:
        places_ptr: int16 to be read without sign, first row's indices.
        ends_ptr: prefix sums of the blocks of each segment.
        status_ptr: what ``inspect`` found.
        numbers_ptr: int32, ``k`` of each row.
        stride: from one row's indices to the next, in 16 bytes.
        pitch: from one row of numbers to the next, in 16 bytes.
        segments: number of segments.
        steps: bits of ``segments``.
        k: most blocks of a message.
        world: number of rows.
        TILE: slots of a program.
    """
    peer = tl.program_id(1)
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = slot < tl.load(status_ptr + world + peer)
    before = tl.zeros((TILE,), tl.int32)
    ends_ptr += peer.to(tl.int64) * segments
    for i in range(steps):
        probe = before + (tl.full((TILE,), 1, tl.int32) << (steps - 1 - i))
        end = tl.load(ends_ptr + probe - 1, mask=live & (probe <= segments), other=LAST)
        before = tl.where(end <= slot, probe, before)
    place = tl.load(_row(places_ptr, peer, stride) + slot, mask=live, other=0).to(tl.int32) & 0xFFFF
    tl.store(_row(numbers_ptr, peer, pitch) + slot, tl.where(live, before * IN_SEGMENT + place, -1), mask=slot < k)


@triton.jit
def _bits(words_ptr, peer, stride, block, bits):
    """Whether each block is in the bitmap of a row."""
    word = tl.load(_row(words_ptr, peer, stride) + (block >> 5), mask=block < bits, other=0)
    return (word >> (block & 31)) & 1


@triton.jit(do_not_specialize=["stride", "pitch", "bits"])
def tally(words_ptr, counts_ptr, stride, pitch, bits, TILE: tl.constexpr):
    """Blocks in each tile of each row's bitmap; rows of words and of counts are so many times 16 bytes apart."""
    tile, peer = tl.program_id(0), tl.program_id(1)
    bit = _bits(words_ptr, peer, stride, tile * TILE + tl.arange(0, TILE), bits)
    tl.store(_row(counts_ptr, peer, pitch) + tile, tl.sum(bit, axis=0))


@triton.jit(do_not_specialize=["stride", "pitch", "bits", "k"])
def spread(words_ptr, ends_ptr, status_ptr, numbers_ptr, stride, pitch, bits, k, TILE: tl.constexpr):
    """Numbers of the blocks in each row's bitmap; slots that are empty stay as they are.

    Rows of words and of numbers are ``stride`` and ``pitch`` times 16 bytes apart.
    """
    tile, peer = tl.program_id(0), tl.program_id(1)
    block = tile * TILE + tl.arange(0, TILE)
    bit = _bits(words_ptr, peer, stride, block, bits)
    before = tl.load(ends_ptr + peer.to(tl.int64) * tl.num_programs(0) + tile) - tl.sum(bit, axis=0)
    slot = before + tl.cumsum(bit, axis=0) - 1
    good = (tl.load(status_ptr + peer) == 0).to(tl.int32)
    tl.store(_row(numbers_ptr, peer, pitch) + slot, block, mask=(bit * good > 0) & (slot < k))


@triton.jit
def _values(value_ptr, scale_ptr, slot, live, lane, BLOCK: tl.constexpr, INT8: tl.constexpr):
    """Blocks of one message in float32, 0 in empty slots."""
    values = tl.load(value_ptr + slot.to(tl.int64)[:, None] * BLOCK + lane, mask=live[:, None], other=0).to(tl.float32)
    if INT8:
        values = values * tl.load(scale_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    return values


@triton.jit(do_not_specialize=["stride", "pitch", "num_blocks", "world"])
def check(
    numbers_ptr, status_ptr, value_ptr, scale_ptr, stride, pitch, num_blocks, world,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add to the status of each message whose numbers do not ascend, leave the model, or whose values are not finite.

    Args:
        numbers_ptr: int32, ``k`` of each row.
        status_ptr: what ``inspect`` found.
        value_ptr: first row's values, float32, bfloat16 or int8.
        scale_ptr: first row's scales, bfloat16 (``INT8``).
        stride: from one row's values to the next, and its scales, in 16 bytes.
        pitch: from one row of numbers to the next, in 16 bytes.
        num_blocks: blocks of the model.
        world: number of rows.
        BLOCK: elements of a block.
        TILE: slots of a program.
        INT8: whether values are int8.
    """
    peer = tl.program_id(1)
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = slot < tl.load(status_ptr + world + peer)
    numbers_ptr = _row(numbers_ptr, peer, pitch)
    number = tl.load(numbers_ptr + slot, mask=live, other=0)
    previous = tl.load(numbers_ptr + slot - 1, mask=live & (slot > 0), other=-1)
    wrong = live & ((number <= previous) | (number < 0) | (number >= num_blocks))
    lane = tl.arange(0, BLOCK)[None, :]
    value_ptr, scale_ptr = _row(value_ptr, peer, stride), _row(scale_ptr, peer, stride)
    values = _values(value_ptr, scale_ptr, slot, live, lane, BLOCK, INT8)
    finite = tl.min((tl.abs(values) <= LARGEST).to(tl.int32), axis=1) > 0
    finite = finite | (tl.load(status_ptr + 2 * world + peer) != 0)
    code = 128 * tl.max(wrong.to(tl.int32), axis=0) + 256 * tl.max((live & (finite == 0)).to(tl.int32), axis=0)
    tl.atomic_or(status_ptr + peer, code)


@triton.jit(do_not_specialize=["world"])
def decide(status_ptr, world, WIDTH: tl.constexpr):
    """The verdict: 2 if a message is malformed, 1 if a gradient was not finite, 0 if neither."""
    peer = tl.arange(0, WIDTH)
    code = tl.load(status_ptr + peer, mask=peer < world, other=0)
    flags = tl.load(status_ptr + 2 * world + peer, mask=peer < world, other=0)
    dropped = tl.max((flags != 0).to(tl.int32), axis=0)
    tl.store(status_ptr + 3 * world, tl.where(tl.max(code, axis=0) > 0, 2, dropped))
