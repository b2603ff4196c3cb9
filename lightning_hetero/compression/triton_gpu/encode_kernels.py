"""Triton kernels of block top-k: error feedback with scores, exact pick of a threshold bin, packing in order.

======================  ==================================================================  ========================
kernel                  what it does                                                        bytes an element
======================  ==================================================================  ========================
``accumulate``          ``r += w g``, block scores, histogram of the scores' exponents      12.25 (float32 gradient)
``hold``                removes scores of parameters without a gradient                     0, or 0.5 of those
``pick``                one program: the bin in which the k-th largest score lies           0
``refine``              histogram of the 7 upper bits of the mantissa in that exponent      0.25
``count``               blocks of each tile above and in the edge bin                       0.25
``place``               numbers of the chosen blocks, ascending                             0.25
``pack``                values in the wire's type; the rounding error returns to ``r``      chosen blocks only
======================  ==================================================================  ========================

The threshold comes from the scores of this step, so no state has to follow the residual. Slots are prefix sums, not
atomic counters, so a message is the same in every run. Selection is that of
:func:`lightning_hetero.compression.selectors.histogram`. Integers are not specialized, so a new value, as of another
density, does not compile a kernel again; alignment that the compiler has to know is given as a factor. The scores are
padded with zeros up to the end of the last program. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.compression import value_codecs
from lightning_hetero.compression.triton_gpu import chunks

__all__ = ["EXPONENT_BINS", "accumulate", "count", "hold", "pack", "pick", "place", "refine"]

EXPONENT_BINS = 2**8
"""Bins of the histogram of scores: one for each exponent of float32."""

# Kernels read globals of their module only, and those only as constexpr.
COLUMNS = tl.constexpr(chunks.COLUMNS)
LARGEST = tl.constexpr(value_codecs.LARGEST_FLOAT32)
LARGEST_BF16 = tl.constexpr(value_codecs.LARGEST_BFLOAT16)
ROUND = tl.constexpr(value_codecs.ROUNDING_TERM)


@triton.jit(do_not_specialize=["stamp"])
def accumulate(
    g_ptr, r_ptr, score_ptr, hist_ptr, used_ptr, table_ptr, weight, stamp,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Apply ``r += w g`` where ``g`` is finite, score blocks by ``s = sum |r|``, and count the exponents of ``s``.

    The score of a block is infinite if something in it is not finite, which fills the last bin of the histogram.

    Args:
        g_ptr: gradients of a bucket, float32, bfloat16 or float16.
        r_ptr: residual of the model, float32.
        score_ptr: its scores, float32.
        hist_ptr: 256 counters, int32.
        used_ptr: for each parameter, the stamp of the last call in which its gradient was not all 0, int32 (``HOLD``).
        table_ptr: a row for each program, see :mod:`lightning_hetero.compression.triton_gpu.chunks`.
        weight: share of this worker, divided by the scale of the gradient.
        stamp: stamp of this call (``HOLD``).
        BLOCK: elements of a block.
        TILE: blocks that are processed at once.
        UNIT: elements of the gradient that are counted as one in the table.
        HOLD: whether a parameter may be held back if its gradient is all 0.
    """
    g_ptr, first, left, blocks, number = _chunk(g_ptr, table_ptr, UNIT)
    r_ptr += first * BLOCK
    score_ptr += first
    totals = tl.zeros((256,), tl.int32)
    some = tl.full((), 0, tl.int32)
    for begin in range(0, blocks, TILE):
        row = begin + tl.arange(0, TILE)
        live = row < blocks
        at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        g = tl.load(g_ptr + at, mask=at < left, other=0.0).to(tl.float32)
        if HOLD:
            some = tl.maximum(some, tl.max(tl.max((g != 0).to(tl.int32), axis=1), axis=0))
        g = g * weight
        r = tl.load(r_ptr + at, mask=live[:, None], other=0.0)
        fine = tl.abs(g) <= LARGEST  # false for NaN, too
        r = tl.where(fine, r + g, r)
        tl.store(r_ptr + at, r, mask=live[:, None])
        score = tl.sum(tl.where(fine, tl.abs(r), float("inf")), axis=1)
        tl.store(score_ptr + row, score, mask=live)
        # Scores are not negative: their bits without the mantissa are the exponent, 255 if infinite.
        totals += tl.histogram(score.to(tl.int32, bitcast=True) >> 23, 256)
    tl.atomic_add(hist_ptr + tl.arange(0, 256), totals, mask=totals > 0)
    if HOLD:
        tl.store(used_ptr + number, stamp, mask=some > 0)


@triton.jit
def _chunk(g_ptr, table_ptr, UNIT: tl.constexpr):
    """Return a pointer to this program's part of a gradient, and its row of the table.

    All numbers in it fit into 32 bits, except for the first block of the model: elements are counted from it, in 64.
    """
    row = table_ptr + tl.program_id(0).to(tl.int64) * COLUMNS
    left, blocks = tl.load(row + 1).to(tl.int32) * UNIT, tl.load(row + 3).to(tl.int32)
    return g_ptr + tl.load(row) * UNIT, tl.load(row + 2), left, blocks, tl.load(row + 4)


@triton.jit(do_not_specialize=["stamp"])
def hold(score_ptr, hist_ptr, used_ptr, table_ptr, stamp, TILE: tl.constexpr):
    """Set the scores of parameters whose gradient was all 0 to 0, and remove them from the histogram.

    Args:
        score_ptr: scores of the model.
        hist_ptr: their histogram.
        used_ptr: stamps that ``accumulate`` has written.
        table_ptr: table of ``accumulate``.
        stamp: stamp of ``accumulate``.
        TILE: blocks that are processed at once.
    """
    _, first, _, blocks, number = _chunk(score_ptr, table_ptr, 1)
    if tl.load(used_ptr + number) != stamp:
        totals = tl.zeros((256,), tl.int32)
        for begin in range(0, blocks, TILE):
            row = begin + tl.arange(0, TILE)
            score = tl.load(score_ptr + first + row, mask=row < blocks, other=0.0)
            totals += tl.histogram(score.to(tl.int32, bitcast=True) >> 23, 256)
            tl.store(score_ptr + first + row, tl.zeros((TILE,), tl.float32), mask=row < blocks)
        bins = tl.arange(0, 256)
        # Blocks of bin 0 stay there, with a score of 0.
        tl.atomic_add(hist_ptr + bins, -totals, mask=(totals > 0) & (bins > 0))


@triton.jit(do_not_specialize=["k"])
def pick(hist_ptr, plan_ptr, k, FINE: tl.constexpr):
    """Find the bin of the ``k``-th block from above, and how many of its blocks are wanted; clear the bins.

    ``plan = (exponent, wanted in it, threshold key, wanted at it, not finite)``; the third and fourth are filled with
    ``FINE=True``, the others with ``FINE=False``.
    """
    bins = tl.arange(0, 256)
    counts = tl.load(hist_ptr + bins)
    wanted = k
    if FINE:
        wanted = tl.load(plan_ptr + 1)
        counts = tl.where(bins < 128, counts, 0)
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    edge = tl.max(tl.where(above + counts >= wanted, bins, 0), axis=0)
    rest = wanted - tl.sum(tl.where(bins > edge, counts, 0), axis=0)
    tl.store(hist_ptr + bins, tl.zeros((256,), tl.int32))
    if FINE:
        tl.store(plan_ptr + 2, tl.load(plan_ptr) * 128 + edge)
        tl.store(plan_ptr + 3, rest)
    else:
        tl.store(plan_ptr, edge)
        tl.store(plan_ptr + 1, rest)
        tl.store(plan_ptr + 4, (tl.sum(tl.where(bins == 255, counts, 0), axis=0) > 0).to(tl.int32))


@triton.jit
def refine(score_ptr, hist_ptr, plan_ptr, TILE: tl.constexpr, ITERS: tl.constexpr):
    """Count the upper 7 bits of the mantissa of the scores with the exponent that ``pick`` found."""
    exponent = tl.load(plan_ptr)
    totals = tl.zeros((256,), tl.int32)
    for it in range(ITERS):
        row = (tl.program_id(0) * ITERS + it) * TILE + tl.arange(0, TILE)
        key = tl.load(score_ptr + row).to(tl.int32, bitcast=True) >> 16
        # Bin 255, which no mantissa of 7 bits reaches, takes all other exponents, and is left out below.
        totals += tl.histogram(tl.where((key >> 7) == exponent, key & 127, 255), 256)
    bins = tl.arange(0, 256)
    tl.atomic_add(hist_ptr + bins, totals, mask=(totals > 0) & (bins < 128))


@triton.jit
def _marks(score_ptr, plan_ptr, row):
    """Return whether each block of a tile is above the edge bin, and whether it is in it."""
    score = tl.load(score_ptr + row)
    key = score.to(tl.int32, bitcast=True) >> 16
    edge = tl.load(plan_ptr + 2)
    above = ((key > edge) & (score > 0)).to(tl.int32)
    return above, ((key == edge) & (score > 0)).to(tl.int32)


@triton.jit
def count(score_ptr, plan_ptr, above_ptr, edge_ptr, TILE: tl.constexpr):
    """Count the blocks of each tile above the edge bin and in it."""
    tile = tl.program_id(0)
    above, edge = _marks(score_ptr, plan_ptr, tile * TILE + tl.arange(0, TILE))
    tl.store(above_ptr + tile, tl.sum(above, axis=0))
    tl.store(edge_ptr + tile, tl.sum(edge, axis=0))


@triton.jit(do_not_specialize=["k"])
def place(score_ptr, plan_ptr, above_ptr, edge_ptr, chosen_ptr, k, TILE: tl.constexpr):
    """Write the numbers of the chosen blocks, ascending: all above the edge bin, and an even share of those in it.

    Args:
        score_ptr: scores.
        plan_ptr: result of ``pick``.
        above_ptr: inclusive prefix sums over tiles of ``count``.
        edge_ptr: the same for the edge bin.
        chosen_ptr: int32, ``k`` slots.
        k: budget.
        TILE: scores of a program.
    """
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    above, edge = _marks(score_ptr, plan_ptr, row)
    above_before = tl.load(above_ptr + tile) - tl.sum(above, axis=0)
    edge_before = tl.load(edge_ptr + tile) - tl.sum(edge, axis=0)
    total = tl.maximum(tl.load(edge_ptr + tl.num_programs(0) - 1), 1)
    quota = tl.minimum(tl.load(plan_ptr + 3), total).to(tl.int64)
    seen = edge_before + tl.cumsum(edge, axis=0)
    keep = above + edge * (seen * quota % total < quota).to(tl.int32)  # where floor(seen quota / total) grows
    slot = above_before + (edge_before * quota // total).to(tl.int32) + tl.cumsum(keep, axis=0) - 1
    tl.store(chosen_ptr + slot, row, mask=(keep > 0) & (slot < k))


@triton.jit
def _nearest_bf16(x):
    """Return the nearest bfloat16 to a finite float32, ties to even, as float32, the same on every device."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["k"])
def pack(
    chosen_ptr, r_ptr, value_ptr, scale_ptr, index_ptr, counts_ptr, k,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write the values of the chosen blocks in the wire's type, and their indices; return rounding errors to ``r``.

    Args:
        chosen_ptr: numbers of blocks, -1 in empty slots.
        r_ptr: residual.
        value_ptr: float32, bfloat16 or int8 values of the message.
        scale_ptr: bfloat16 scale of each block (``INT8``).
        index_ptr: uint16 numbers within segments of 65 536 blocks (``SEGMENTS``), or a bitmap in 32-bit words.
        counts_ptr: int32 blocks of each segment (``SEGMENTS``).
        k: slots.
        BLOCK: elements of a block.
        TILE: slots of a program.
        INT8: whether values are int8.
        SEGMENTS: whether indices are numbers in segments, not a bitmap.
    """
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(chosen_ptr + slot, mask=slot < k, other=-1)
    live = block >= 0
    lane = tl.arange(0, BLOCK)[None, :]
    at = block.to(tl.int64)[:, None] * BLOCK + lane
    out = slot.to(tl.int64)[:, None] * BLOCK + lane  # a message may have more elements than 32 bits count
    r = tl.load(r_ptr + at, mask=live[:, None], other=0.0)
    if INT8:
        wide = _nearest_bf16(tl.div_rn(tl.max(tl.abs(r), axis=1), 127.0))
        some = wide > 0
        q = tl.div_rn(r, tl.where(some, wide, 1.0)[:, None])
        q = tl.minimum(tl.maximum((q + ROUND) - ROUND, -127.0), 127.0)
        q = tl.where(some[:, None], q, 0.0)
        sent = q * wide[:, None]
        tl.store(value_ptr + out, q.to(tl.int8), mask=live[:, None])
        tl.store(scale_ptr + slot, wide.to(tl.bfloat16), mask=live)
    else:
        wire = value_ptr.dtype.element_ty
        sent = r
        if wire == tl.bfloat16:
            sent = _nearest_bf16(tl.minimum(tl.maximum(r, -LARGEST_BF16), LARGEST_BF16))
        tl.store(value_ptr + out, sent.to(wire), mask=live[:, None])
    tl.store(r_ptr + at, r - sent, mask=live[:, None])
    if SEGMENTS:
        tl.store(index_ptr + slot, (block & 65535).to(tl.int16), mask=live)
        tl.atomic_add(counts_ptr + (block >> 16), 1, mask=live)
    else:
        bit = tl.full((TILE,), 1, tl.int32) << (block & 31)
        tl.atomic_or(index_ptr + (block >> 5), bit, mask=live)
