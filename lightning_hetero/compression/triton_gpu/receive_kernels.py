"""Triton kernels for received messages: the device numbers and checks the blocks of all messages, and decides.

=============  ===================================================================================================
kernel         what it does
=============  ===================================================================================================
``expand``     numbers of the blocks from segments; ``tally`` and ``spread`` from a bitmap
``check``      ascending numbers within the model, finite values
``decide``     one verdict for all messages: 0 merge, 1 a gradient was not finite, 2 a message is malformed
=============  ===================================================================================================

Headers are checked in :mod:`lightning_hetero.compression.triton_gpu.header_kernels`, verdicts are carried out in
:mod:`lightning_hetero.compression.triton_gpu.apply_kernels`, and the status is that of
:mod:`lightning_hetero.compression.triton_gpu.status`. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.compression import wire_format
from lightning_hetero.compression.triton_gpu.encode_kernels import LARGEST
from lightning_hetero.compression.triton_gpu.header_kernels import _row

__all__ = ["check", "decide", "expand", "spread", "tally"]

SEGMENT_BLOCKS = tl.constexpr(wire_format.SEGMENT_BLOCKS)
LAST = tl.constexpr(2**31 - 1)
"""End of a segment after the last one: no slot reaches it."""


@triton.jit(do_not_specialize=["stride", "pitch", "segments", "steps", "k", "world"])
def expand(places_ptr, ends_ptr, status_ptr, numbers_ptr, stride, pitch, segments, steps, k, world, TILE: tl.constexpr):
    """Write the numbers of each message's blocks, -1 in empty slots, from segment (found by bisection) and place.

    Args:
        places_ptr: first row's indices, int16 to read as unsigned.
        ends_ptr: prefix sums of the blocks of each segment.
        status_ptr: result of ``inspect``.
        numbers_ptr: receives int32 numbers, ``k`` in each row.
        stride: distance from one row's indices to the next, in units of 16 bytes.
        pitch: distance from one row of numbers to the next, in units of 16 bytes.
        segments: number of segments.
        steps: steps of the bisection, the bits of ``segments``.
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
    tl.store(_row(numbers_ptr, peer, pitch) + slot, tl.where(live, before * SEGMENT_BLOCKS + place, -1), mask=slot < k)


@triton.jit
def _bits(words_ptr, peer, stride, block, bits):
    """Return whether each block is in the bitmap of a row."""
    word = tl.load(_row(words_ptr, peer, stride) + (block >> 5), mask=block < bits, other=0)
    return (word >> (block & 31)) & 1


@triton.jit(do_not_specialize=["stride", "pitch", "bits"])
def tally(words_ptr, counts_ptr, stride, pitch, bits, TILE: tl.constexpr):
    """Count the blocks in each tile of each row's bitmap; ``stride`` and ``pitch`` are in units of 16 bytes."""
    tile, peer = tl.program_id(0), tl.program_id(1)
    bit = _bits(words_ptr, peer, stride, tile * TILE + tl.arange(0, TILE), bits)
    tl.store(_row(counts_ptr, peer, pitch) + tile, tl.sum(bit, axis=0))


@triton.jit(do_not_specialize=["stride", "pitch", "bits", "k"])
def spread(words_ptr, ends_ptr, status_ptr, numbers_ptr, stride, pitch, bits, k, TILE: tl.constexpr):
    """Write the numbers of the blocks in each row's bitmap; empty slots stay as they are.

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
    """Return blocks of one message in float32, 0 in empty slots."""
    values = tl.load(value_ptr + slot.to(tl.int64)[:, None] * BLOCK + lane, mask=live[:, None], other=0).to(tl.float32)
    if INT8:
        values = values * tl.load(scale_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    return values


@triton.jit(do_not_specialize=["stride", "pitch", "num_blocks", "world"])
def check(
    numbers_ptr, status_ptr, value_ptr, scale_ptr, stride, pitch, num_blocks, world,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add faults to the status of messages: numbers that do not ascend or exceed the model, values that are not finite.

    Args:
        numbers_ptr: int32 numbers of blocks, ``k`` in each row.
        status_ptr: result of ``inspect``, to which faults are added.
        value_ptr: first row's values, float32, bfloat16 or int8.
        scale_ptr: first row's scales, bfloat16 (``INT8``).
        stride: distance from one row's values, or scales, to the next, in units of 16 bytes.
        pitch: distance from one row of numbers to the next, in units of 16 bytes.
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
    """Write the verdict: 2 if a message is malformed, 1 if a gradient was not finite, 0 if neither."""
    peer = tl.arange(0, WIDTH)
    code = tl.load(status_ptr + peer, mask=peer < world, other=0)
    flags = tl.load(status_ptr + 2 * world + peer, mask=peer < world, other=0)
    dropped = tl.max((flags != 0).to(tl.int32), axis=0)
    tl.store(status_ptr + 3 * world, tl.where(tl.max(code, axis=0) > 0, 2, dropped))
