"""Triton kernels of block top-k: error feedback with scores, exact pick of a threshold bin, packing in order.

======================  ==================================================================  ========================
kernel                  what it does                                                        bytes an element
======================  ==================================================================  ========================
``accumulate``          ``r += w g``, block scores, histogram of the scores' exponents      12.25 (float32 gradient)
``pick``                one program: the bin in which the k-th largest score lies           0
``refine``              histogram of the 7 upper bits of the mantissa in that exponent      0.25
``count``               blocks of each tile above and in the edge bin                       0.25
``place``               numbers of the chosen blocks, ascending                             0.25
``pack``                values in the wire's type; the rounding error returns to ``r``      chosen blocks only
======================  ==================================================================  ========================

The threshold comes from the scores of this step, so that no state has to follow the residual. Slots are prefix sums,
not atomic counters, so that a message is the same in every run. Selection is that of
:func:`lightning_hetero.compression.selectors.histogram`. Import this module only where Triton is.
"""

import triton
import triton.language as tl

__all__ = ["EXPONENTS", "accumulate", "count", "pack", "pick", "place", "refine"]

EXPONENTS = 256
LARGEST = tl.constexpr(3.4028234663852886e38)
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer


@triton.jit
def accumulate(
    g_ptr, r_ptr, score_ptr, hist_ptr, used_ptr, weight, numel, num_blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ITERS: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """``r += w g`` where ``g`` is finite, ``s = sum |r|`` of each block, and a histogram of the exponents of ``s``.

    The score of a block is infinite if something in it is not finite, which fills the last bin of the histogram.

    Args:
        g_ptr: gradient of one parameter, ``numel`` elements of float32, bfloat16 or float16.
        r_ptr: its residual, float32, ``num_blocks * BLOCK`` elements.
        score_ptr: its scores, float32.
        hist_ptr: 256 counters, int32.
        used_ptr: one byte, 0 if the parameter's scores are to be 0 in this step (``HOLD``).
        weight: share of this worker over what the gradient is scaled by.
        numel: elements of the gradient.
        num_blocks: blocks of the residual.
        BLOCK: elements of a block.
        TILE: blocks that are worked on at once.
        ITERS: tiles of a program.
        HOLD: whether the parameter may be held back.
    """
    totals = tl.zeros((256,), tl.int32)
    for it in range(ITERS):
        row = (tl.program_id(0) * ITERS + it) * TILE + tl.arange(0, TILE)
        live = row < num_blocks
        at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        g = tl.load(g_ptr + at, mask=at < numel, other=0.0).to(tl.float32) * weight
        r = tl.load(r_ptr + at, mask=live[:, None], other=0.0)
        fine = tl.abs(g) <= LARGEST
        r = tl.where(fine, r + g, r)
        tl.store(r_ptr + at, r, mask=live[:, None])
        score = tl.sum(tl.where(fine, tl.abs(r), float("inf")), axis=1)
        if HOLD:
            score = tl.where(tl.load(used_ptr) != 0, score, 0.0)
        tl.store(score_ptr + row, score, mask=live)
        totals += tl.histogram(score.to(tl.int32, bitcast=True) >> 23, 256)
    tl.atomic_add(hist_ptr + tl.arange(0, 256), totals, mask=totals > 0)


@triton.jit
def pick(hist_ptr, plan_ptr, k, FINE: tl.constexpr):
    """The highest bin that is reached by ``k`` blocks from above, and how many of its blocks are wanted; clears bins.

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
def refine(score_ptr, hist_ptr, plan_ptr, num_blocks, TILE: tl.constexpr, ITERS: tl.constexpr):
    """Histogram of the upper 7 bits of the mantissa of the scores with the exponent that ``pick`` found."""
    exponent = tl.load(plan_ptr)
    totals = tl.zeros((256,), tl.int32)
    for it in range(ITERS):
        row = (tl.program_id(0) * ITERS + it) * TILE + tl.arange(0, TILE)
        key = tl.load(score_ptr + row, mask=row < num_blocks, other=0.0).to(tl.int32, bitcast=True) >> 16
        inside = (row < num_blocks) & ((key >> 7) == exponent)
        totals += tl.histogram(tl.where(inside, key & 127, 255), 256)
    bins = tl.arange(0, 256)
    tl.atomic_add(hist_ptr + bins, totals, mask=(totals > 0) & (bins < 128))


@triton.jit
def _marks(score_ptr, plan_ptr, row, num_blocks):
    """Which blocks of a tile are above the edge bin, and which in it."""
    score = tl.load(score_ptr + row, mask=row < num_blocks, other=0.0)
    key = score.to(tl.int32, bitcast=True) >> 16
    edge = tl.load(plan_ptr + 2)
    above = ((key > edge) & (score > 0)).to(tl.int32)
    return above, ((key == edge) & (score > 0)).to(tl.int32)


@triton.jit
def count(score_ptr, plan_ptr, above_ptr, edge_ptr, num_blocks, TILE: tl.constexpr):
    """Blocks of each tile above the edge bin and in it."""
    tile = tl.program_id(0)
    above, edge = _marks(score_ptr, plan_ptr, tile * TILE + tl.arange(0, TILE), num_blocks)
    tl.store(above_ptr + tile, tl.sum(above, axis=0))
    tl.store(edge_ptr + tile, tl.sum(edge, axis=0))


@triton.jit
def place(score_ptr, plan_ptr, above_ptr, edge_ptr, chosen_ptr, num_blocks, k, TILE: tl.constexpr):
    """Numbers of the chosen blocks, ascending: all above the edge bin, and the first ones in it up to the budget.

    Args:
        score_ptr: scores.
        plan_ptr: what ``pick`` found.
        above_ptr: inclusive prefix sums over tiles of ``count``.
        edge_ptr: the same for the edge bin.
        chosen_ptr: int32, ``k`` slots.
        num_blocks: number of scores.
        k: budget.
        TILE: scores of a program.
    """
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    above, edge = _marks(score_ptr, plan_ptr, row, num_blocks)
    above_before = tl.load(above_ptr + tile) - tl.sum(above, axis=0)
    edge_before = tl.load(edge_ptr + tile) - tl.sum(edge, axis=0)
    quota = tl.load(plan_ptr + 3)
    fits = edge * ((edge_before + tl.cumsum(edge, axis=0)) <= quota).to(tl.int32)
    keep = above + fits
    slot = above_before + tl.minimum(edge_before, quota) + tl.cumsum(keep, axis=0) - 1
    tl.store(chosen_ptr + slot, row, mask=(keep > 0) & (slot < k))


@triton.jit
def _nearest_bf16(x):
    """The nearest bfloat16 of a finite float32, ties to even, as float32: the same on every device and interpreted."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack(
    chosen_ptr, r_ptr, value_ptr, scale_ptr, index_ptr, counts_ptr, k,
    BLOCK: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Values of the chosen blocks in the wire's type, what rounding loses back into the residual, and their indices.

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
        SEGMENTS: whether indices are numbers in segments, rather than a bitmap.
    """
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(chosen_ptr + slot, mask=slot < k, other=-1)
    live = block >= 0
    lane = tl.arange(0, BLOCK)[None, :]
    at = block.to(tl.int64)[:, None] * BLOCK + lane
    out = slot[:, None] * BLOCK + lane
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
