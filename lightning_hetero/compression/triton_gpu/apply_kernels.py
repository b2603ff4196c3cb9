"""Triton kernels that act on a verdict: messages are merged and the sum handed on, or the step is taken back.

=============  ===================================================================================================
kernel         what it does
=============  ===================================================================================================
``merge``      adds one message, and marks its blocks, if the verdict is 0
``take_back``  returns what this rank has sent to its residual, if it is not
``deliver``    hands the sum of a bucket to the caller, or takes its gradient out of the residual
``wipe``       clears the merged blocks
=============  ===================================================================================================

Messages and the verdict are those of :mod:`lightning_hetero.compression.triton_gpu.receive_kernels`. Import this module
only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.compression.triton_gpu.encode_kernels import LARGEST, _chunk, _nearest_bf16
from lightning_hetero.compression.triton_gpu.header_kernels import _row
from lightning_hetero.compression.triton_gpu.receive_kernels import _values

__all__ = ["deliver", "merge", "take_back", "wipe"]


@triton.jit(do_not_specialize=["peer", "stride", "pitch", "k"])
def merge(
    numbers_ptr, value_ptr, scale_ptr, merged_ptr, touched_ptr, verdict_ptr, peer, stride, pitch, k,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add the blocks of one message, each of which it has once, and mark them.

    Args:
        numbers_ptr: int32, ``k`` of each row.
        value_ptr: first row's values.
        scale_ptr: first row's scales.
        merged_ptr: sum, float32.
        touched_ptr: a byte per block of the model.
        verdict_ptr: nothing is written if it is not 0.
        peer: row of the message.
        stride: from one row's values to the next, and its scales, in 16 bytes.
        pitch: from one row of numbers to the next, in 16 bytes.
        k: most blocks of a message.
        BLOCK: elements of a block.
        TILE: slots of a program.
        INT8: whether values are int8.
    """
    if tl.load(verdict_ptr) == 0:
        slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
        number = tl.load(_row(numbers_ptr, peer, pitch) + slot, mask=slot < k, other=-1)
        live = number >= 0
        lane = tl.arange(0, BLOCK)[None, :]
        its_values, its_scales = _row(value_ptr, peer, stride), _row(scale_ptr, peer, stride)
        values = _values(its_values, its_scales, slot, live, lane, BLOCK, INT8)
        # A message has each block once, so no two programs add to one element, and no atomic is needed.
        at = merged_ptr + number.to(tl.int64)[:, None] * BLOCK + lane
        tl.store(at, tl.load(at, mask=live[:, None], other=0.0) + values, mask=live[:, None])
        tl.store(touched_ptr + number, tl.full((TILE,), 1, tl.uint8), mask=live)


@triton.jit(do_not_specialize=["k"])
def take_back(
    chosen_ptr, value_ptr, scale_ptr, r_ptr, verdict_ptr, k,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Apply ``r += sent`` to the blocks of this rank's own message, if the verdict is not 0."""
    if tl.load(verdict_ptr) != 0:
        slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
        number = tl.load(chosen_ptr + slot, mask=slot < k, other=-1)
        live = number >= 0
        lane = tl.arange(0, BLOCK)[None, :]
        values = _values(value_ptr, scale_ptr, slot, live, lane, BLOCK, INT8)
        at = r_ptr + number.to(tl.int64)[:, None] * BLOCK + lane
        tl.store(at, tl.load(at, mask=live[:, None], other=0.0) + values, mask=live[:, None])


@triton.jit
def deliver(
    g_ptr, r_ptr, merged_ptr, verdict_ptr, table_ptr, weight, scale, fill,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Set ``g = scale * merged`` if the verdict is 0; else ``r -= weight * g`` where it had been added, ``g = fill``.

    Args:
        g_ptr: gradients of a bucket.
        r_ptr: residual of the model.
        merged_ptr: sum.
        verdict_ptr: what ``decide`` found.
        table_ptr: that of ``accumulate``.
        weight: that of ``accumulate``.
        scale: factor of the sum.
        fill: gradient of a step that is left out.
        BLOCK: elements of a block.
        TILE: elements that are worked on at once.
        UNIT: elements of the gradient that are counted as one in the table.
    """
    g_ptr, first, left, _, _ = _chunk(g_ptr, table_ptr, UNIT)
    r_ptr += first * BLOCK
    merged_ptr += first * BLOCK
    if tl.load(verdict_ptr) == 0:
        for begin in range(0, left, TILE):
            at = begin + tl.arange(0, TILE)
            inside = at < left
            total = tl.load(merged_ptr + at, mask=inside, other=0.0) * scale
            if g_ptr.dtype.element_ty == tl.bfloat16:
                total = _nearest_bf16(total)
            tl.store(g_ptr + at, total.to(g_ptr.dtype.element_ty), mask=inside)
    else:
        for begin in range(0, left, TILE):
            at = begin + tl.arange(0, TILE)
            inside = at < left
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * weight
            r = tl.load(r_ptr + at, mask=inside, other=0.0)
            # What is not finite has never been added, and a comparison is false of NaN.
            tl.store(r_ptr + at, tl.where(tl.abs(g) <= LARGEST, r - g, r), mask=inside)
            tl.store(g_ptr + at, (tl.zeros((TILE,), tl.float32) + fill).to(g_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pitch", "k"])
def wipe(numbers_ptr, merged_ptr, verdict_ptr, pitch, k, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Clear ``merged`` in the blocks of all messages, if they were merged; rows of numbers lie ``pitch`` apart."""
    if tl.load(verdict_ptr) == 0:
        slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
        number = tl.load(_row(numbers_ptr, tl.program_id(1), pitch) + slot, mask=slot < k, other=-1)
        at = number.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(merged_ptr + at, tl.zeros((TILE, BLOCK), tl.float32), mask=(number >= 0)[:, None])
