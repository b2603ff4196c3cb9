"""Triton kernels that act on a verdict: messages are merged and the sum is delivered, or the step is undone.

=============  ===================================================================================================
kernel         what it does
=============  ===================================================================================================
``merge``      adds one message, and marks its blocks, if the verdict is 0
``take_back``  adds what this rank has sent back to its residual, if it is not
``deliver``    writes the sum of a bucket over its gradient, or subtracts the gradient from the residual
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
    """Add the blocks of one message, in which each occurs once, and mark them.

    Args:
        numbers_ptr: int32 numbers of blocks, ``k`` in each row.
        value_ptr: first row's values.
        scale_ptr: first row's scales.
        merged_ptr: sum, float32.
        touched_ptr: a byte per block of the model.
        verdict_ptr: verdict; nothing is written if it is not 0.
        peer: row of the message.
        stride: distance from one row's values, or scales, to the next, in units of 16 bytes.
        pitch: distance from one row of numbers to the next, in units of 16 bytes.
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
        verdict_ptr: verdict of ``decide``.
        table_ptr: table of ``accumulate``.
        weight: weight of ``accumulate``.
        scale: factor of the sum.
        fill: gradient of a step that is skipped.
        BLOCK: elements of a block.
        TILE: elements that are processed at once.
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
            # Elements that are not finite were never added, and the comparison is false for NaN.
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
