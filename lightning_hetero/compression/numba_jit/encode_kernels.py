"""Loops of block top-k on CPU in Numba that make a message, with LLVM's vectors: one pass over memory.

Residuals and values are bitwise those of :mod:`lightning_hetero.compression.reference` (like torch, the loops add with
a fused multiply-add); scores are sums in another order. Import this module only where Numba is.

====================  =========================================================  ===================
kernel                what it does                                               bytes an element
====================  =========================================================  ===================
``accumulate``        ``r += w g`` and block scores; stops before what is not    12.25
                      finite, so that it never enters the residual
``at_least``          numbers of the scores that reach a threshold               0.25
``number``            numbers of the chosen blocks into a message                chosen blocks only
``take``              values of the chosen blocks as they are sent; what         chosen blocks only
                      rounding loses stays in the residual
====================  =========================================================  ===================
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from lightning_hetero.compression.message_header import HEADER_BYTES
from lightning_hetero.compression.numba_jit.simd import (
    PREFETCH_BLOCKS,
    WIDTH,
    absolute,
    add,
    any_reaches,
    bfloat16,
    fma,
    high,
    load,
    prefetch,
    store,
    store_high,
    sub,
    total,
)
from lightning_hetero.compression.selectors import Indices
from lightning_hetero.compression.value_codecs import LARGEST_INT8, ROUNDING_TERM
from lightning_hetero.compression.wire_format import SEGMENT_BLOCKS

__all__ = ["BFLOAT16", "FLOAT32", "INT8", "accumulate", "at_least", "number", "take"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT32, BFLOAT16, INT8 = range(3)
"""Types of values, as numbers for the loops."""

# Loops read globals as constants of their type: with Python floats they would calculate in float64.
ZERO, LARGEST = np.float32(0.0), np.finfo(np.float32).max
MOST, ROUND = np.float32(LARGEST_INT8), np.float32(ROUNDING_TERM)


@njit(nogil=True, cache=True)
def accumulate(
    r: Floats, g: Floats, parts: Indices, w: np.float32, scores: Floats, block: int, reached: Indices
) -> bool:
    """Apply ``r += w g`` and set ``scores`` for parts of a bucket; return whether all of it is finite.

    Args:
        r: residual.
        g: gradients of the bucket.
        parts: a row for each part of a parameter: its place in the residual (a multiple of the block), its place in the
            bucket, and its number of elements.
        w: float32 weight.
        scores: scores of all blocks.
        block: elements of a block.
        reached: receives the number of elements of each part that were added; the loop stops at the first block that is
            not finite.
    """
    for n in range(len(parts)):
        to, at, size = parts[n, 0], parts[n, 1], parts[n, 2]
        reached[n] = _accumulate(r, to, g, at, size, w, scores, block)
        if reached[n] < size:
            return False
    return True


@njit(nogil=True, cache=True)
def _accumulate(r: Floats, to: int, g: Floats, at: int, size: int, w: np.float32, scores: Floats, block: int) -> int:
    """Accumulate one part; return how many of its elements were added."""
    # ``not x <= LARGEST``, not ``x > LARGEST``, because it is true for NaN, too. Nothing is stored before it is known.
    for start in range(0, size, block):
        i, stop, score = start, min(start + block, size), ZERO
        while i + 2 * WIDTH <= stop:
            one = fma(w, load(g, at + i), load(r, to + i))
            other = fma(w, load(g, at + i + WIDTH), load(r, to + i + WIDTH))
            part = total(add(absolute(one), absolute(other)))
            if not part <= LARGEST:
                return i
            store(r, to + i, one)
            store(r, to + i + WIDTH, other)
            score += part
            i += 2 * WIDTH
        while i + WIDTH <= stop:
            one = fma(w, load(g, at + i), load(r, to + i))
            part = total(absolute(one))
            if not part <= LARGEST:
                return i
            store(r, to + i, one)
            score += part
            i += WIDTH
        while i < stop:
            value = fma(w, g[at + i], r[to + i])
            if not abs(value) <= LARGEST:
                return i
            r[to + i] = value
            score += abs(value)
            i += 1
        scores[(to + start) // block] = score
    return size


@njit(nogil=True, cache=True)
def at_least(scores: Floats, threshold: np.float32, found: Indices) -> int:
    """Write the numbers of the scores that reach a threshold, until ``found`` is full; return how many there are."""
    count, i = 0, 0
    while i < len(scores):
        # Few scores reach it, so most vectors are skipped after one comparison.
        if i + WIDTH <= len(scores) and not any_reaches(load(scores, i), threshold):
            i += WIDTH
            continue
        stop = min(i + WIDTH, len(scores))
        while i < stop:
            if scores[i] >= threshold:
                if count == len(found):
                    return count
                found[count] = i
                count += 1
            i += 1
    return count


@njit(nogil=True, cache=True)
def number(message: Bytes, indices: Indices, places_at: int) -> None:
    """Clear a message and write the table of segments and the indices, as ``MessageFormat.write_indices`` does."""
    message[:] = 0
    counts = message[HEADER_BYTES:places_at].view(np.int32)
    places = message[places_at : places_at + 2 * len(indices)].view(np.uint16)
    for n in range(len(indices)):
        counts[indices[n] // SEGMENT_BLOCKS] += 1
        places[n] = indices[n] % SEGMENT_BLOCKS


@njit(nogil=True, cache=True)
def take(r: Floats, indices: Indices, block: int, kind: int, message: Bytes, values_at: int, scales_at: int) -> None:
    """Write the chosen blocks into a message as values of a kind, and subtract the sent values from the residual.

    Args:
        r: residual.
        indices: numbers of the blocks.
        block: elements of a block.
        kind: ``FLOAT32``, ``BFLOAT16`` or ``INT8``.
        message: uint8.
        values_at: first byte of values in it.
        scales_at: first byte of scales in it.
    """
    size = len(indices) * block
    if kind == FLOAT32:
        wide = message[values_at : values_at + 4 * size].view(np.float32)
    elif kind == BFLOAT16:
        half = message[values_at : values_at + 2 * size].view(np.uint16)
    else:
        small = message[values_at : values_at + size].view(np.int8)
        scales = message[scales_at : scales_at + 2 * len(indices)].view(np.uint16)
    for n in range(len(indices)):
        if n + PREFETCH_BLOCKS < len(indices):
            prefetch(r, indices[n + PREFETCH_BLOCKS] * block)
        begin, to = indices[n] * block, n * block
        if kind == INT8:
            scales[n] = _take_int8(r, begin, block, small, to)
            continue
        j = 0
        while j + WIDTH <= block:
            value = load(r, begin + j)
            if kind == FLOAT32:
                store(wide, to + j, value)
                store(r, begin + j, sub(value, value))
            else:
                sent = bfloat16(value)
                store_high(half, to + j, sent)
                store(r, begin + j, sub(value, sent))
            j += WIDTH
        while j < block:
            single = r[begin + j]
            if kind == FLOAT32:
                wide[to + j] = single
                r[begin + j] = single - single
            else:
                part = bfloat16(single)
                half[to + j] = high(part)
                r[begin + j] = single - part
            j += 1


@njit(nogil=True, cache=True)
def _take_int8(r: Floats, begin: int, block: int, values: npt.NDArray[np.int8], to: int) -> np.uint16:
    """Write one block in int8; return its scale in bfloat16."""
    largest = ZERO
    for i in range(begin, begin + block):
        largest = max(largest, abs(r[i]))
    scale = bfloat16(largest / MOST)
    for j in range(block):
        if scale > ZERO:
            q = min(max((r[begin + j] / scale + ROUND) - ROUND, -MOST), MOST)
            values[to + j] = np.int8(q)
            r[begin + j] -= q * scale
        else:
            values[to + j] = np.int8(0)
    return high(scale)
