"""Loops of block top-k on CPU in Numba, with LLVM's vectors: one pass over memory where torch takes several.

Bitwise the results of :mod:`lightning_hetero.compression.reference` in residuals and values (torch adds with a fused
multiply-add, and so do these); scores are sums in another order. Import this module only where Numba is.

====================  =========================================================  ===================
kernel                what it does                                               bytes an element
====================  =========================================================  ===================
``accumulate``        ``r += w g`` and block scores; stops before what is not    12.25
                      finite, so that it never enters the residual
``at_least``          numbers of the scores that reach a threshold               0.25
``number``            numbers of the chosen blocks into a message                chosen blocks only
``take``              values of the chosen blocks as they are sent; what         chosen blocks only
                      rounding loses stays in the residual
``checksum``          both sums of a message                                     chosen blocks only
``read``              numbers and values of a message, if all of it is in order  chosen blocks only
``unite``             numbers of the blocks of two messages                      chosen blocks only
``fold``              adds blocks into a sum that has their numbers              chosen blocks only
``add_blocks``        adds blocks to a sum of the model's size                   chosen blocks only
====================  =========================================================  ===================
"""

from typing import Any

import numpy as np
from numba import njit

from lightning_hetero.compression.message_header import HEADER_BYTES, HEADER_WEIGHTS
from lightning_hetero.compression.numba_jit.simd import (
    WIDTH,
    absolute,
    add,
    any_reaches,
    bfloat16,
    fma,
    from_high,
    high,
    load,
    prefetch,
    store,
    store_high,
    sub,
    total,
)
from lightning_hetero.compression.wire_format import SEGMENT_BLOCKS

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "INT8",
    "accumulate",
    "add_blocks",
    "at_least",
    "checksum",
    "fold",
    "number",
    "read",
    "take",
    "unite",
]

FLOAT32, BFLOAT16, INT8 = 0, 1, 2
LARGEST = np.float32(np.finfo(np.float32).max)
ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer
ZERO, MOST = np.float32(0.0), np.float32(127.0)
SOON = 16
"""Blocks that are fetched ahead where they lie far apart."""

WEIGHT_0, WEIGHT_1, WEIGHT_2, WEIGHT_3 = map(np.int64, HEADER_WEIGHTS)


@njit(nogil=True, cache=True)
def accumulate(r: Any, g: Any, parts: Any, w: Any, scores: Any, block: int, reached: Any) -> bool:
    """``r += w g`` and ``scores`` for parts of a bucket; returns whether all of it is finite.

    Args:
        r: residual.
        g: gradients of the bucket.
        parts: a row for each part of a parameter: its places in the residual, a multiple of the block, and in the
            bucket, and its elements.
        w: float32 weight.
        scores: of all blocks.
        block: elements of a block.
        reached: receives the elements of each part that were added: what is not finite stops everything behind it.
    """
    for n in range(len(parts)):
        to, at, size = parts[n, 0], parts[n, 1], parts[n, 2]
        reached[n] = _accumulate(r, to, g, at, size, w, scores, block)
        if reached[n] < size:
            return False
    return True


@njit(nogil=True, cache=True)
def _accumulate(r: Any, to: int, g: Any, at: int, size: int, w: Any, scores: Any, block: int) -> int:
    """One part; returns how many of its elements were added."""
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
def at_least(scores: Any, threshold: Any, found: Any) -> int:
    """Numbers of the scores that reach a float32 threshold, until there is no more room; returns how many."""
    count, i = 0, 0
    while i < len(scores):
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
def number(message: Any, indices: Any, places_at: int) -> None:
    """Clear a message and write the table of segments and the indices, as ``MessageFormat.write_indices`` does."""
    message[:] = 0
    counts = message[HEADER_BYTES:places_at].view(np.int32)
    places = message[places_at : places_at + 2 * len(indices)].view(np.uint16)
    for n in range(len(indices)):
        counts[indices[n] // SEGMENT_BLOCKS] += 1
        places[n] = indices[n] % SEGMENT_BLOCKS


@njit(nogil=True, cache=True)
def take(r: Any, indices: Any, block: int, kind: int, message: Any, values_at: int, scales_at: int) -> None:
    """Write the chosen blocks into a message as values of a kind; what is sent leaves the residual.

    Args:
        r: residual.
        indices: numbers of the blocks.
        block: elements of a block.
        kind: ``FLOAT32``, ``BFLOAT16`` or ``INT8``.
        message: uint8.
        values_at: where values begin in it.
        scales_at: where scales begin in it.
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
        if n + SOON < len(indices):
            prefetch(r, indices[n + SOON] * block)
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
def _take_int8(r: Any, begin: int, block: int, values: Any, to: int) -> Any:
    """One block in int8; returns its scale in bfloat16."""
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


@njit(nogil=True, cache=True)
def checksum(payload: Any) -> Any:
    """``(sum w_i, sum (i + 1) w_i)`` of the 32-bit words of bytes, modulo 2^64."""
    words = payload.view(np.int32)
    first, second = np.int64(0), np.int64(0)
    for i in range(len(words)):
        word = np.int64(words[i])
        first += word
        second += word * np.int64(i + 1)
    return first, second


@njit(nogil=True, cache=True)
def read(
    message: Any, due: Any, segments: int, places_at: int, values_at: int, scales_at: int, num_blocks: int, kind: int,
    indices: Any, values: Any,
) -> int:  # fmt: skip
    """Numbers and values of a message that has a list of indices, checked as ``MessageFormat.read`` does.

    Args:
        message: uint8.
        due: magic and version, address, step and fingerprint.
        segments: of the table of segments, which begins behind the header.
        places_at: where indices begin.
        values_at: where values begin.
        scales_at: where scales begin.
        num_blocks: blocks of the model.
        kind: of values.
        indices: int64, receives numbers of blocks, as many as a message may have.
        values: float32, receives their elements, one row a block.

    Returns:
        Blocks of the message; -1 if anything is wrong with it, or its sender's gradient was not finite.
    """
    header = message[:HEADER_BYTES].view(np.int64)
    first, second = checksum(message[HEADER_BYTES:])
    count = header[4]
    first += WEIGHT_0 * header[1] + WEIGHT_1 * header[2] + WEIGHT_2 * header[3] + WEIGHT_3 * count
    if header[0] != due[0] or header[1] != due[1] or header[2] != due[2] or header[7] != due[3]:
        return -1
    if header[3] != 0 or header[5] != first or header[6] != second or not 0 <= count <= len(indices):
        return -1
    counts = message[HEADER_BYTES : HEADER_BYTES + 4 * segments].view(np.int32)
    places = message[places_at : places_at + 2 * len(indices)].view(np.uint16)
    right = _numbers(counts, places, count, num_blocks, indices) and _values(
        message, values_at, scales_at, kind, values.reshape(-1)[: count * values.shape[1]], values.shape[1]
    )
    return count if right else -1


@njit(nogil=True, cache=True)
def _numbers(counts: Any, places: Any, count: int, num_blocks: int, indices: Any) -> bool:
    """Numbers of blocks from the table of segments and the places in them; whether they are in order."""
    n, last = 0, np.int64(-1)
    for segment in range(len(counts)):
        if counts[segment] < 0 or n + counts[segment] > count:
            return False
        for _ in range(counts[segment]):
            index = segment * SEGMENT_BLOCKS + np.int64(places[n])
            if index <= last or index >= num_blocks:
                return False
            indices[n], last = index, index
            n += 1
    return n == count


@njit(nogil=True, cache=True)
def _values(message: Any, values_at: int, scales_at: int, kind: int, values: Any, block: int) -> bool:
    """Values of a message in float32; whether they are finite."""
    size = len(values)
    if kind == FLOAT32:
        wide = message[values_at : values_at + 4 * size].view(np.float32)
        for i in range(size):
            values[i] = wide[i]
    elif kind == BFLOAT16:
        half = message[values_at : values_at + 2 * size].view(np.uint16)
        for i in range(size):
            values[i] = from_high(half[i])
    else:
        small = message[values_at : values_at + size].view(np.int8)
        scales = message[scales_at : scales_at + 2 * (size // block)].view(np.uint16)
        for n in range(size // block):
            scale = from_high(scales[n])
            for i in range(n * block, (n + 1) * block):
                values[i] = np.float32(small[i]) * scale
    strange = 0
    for i in range(size):
        strange += 0 if abs(values[i]) <= LARGEST else 1
    return strange == 0


@njit(nogil=True, cache=True)
def unite(one: Any, other: Any, union: Any) -> int:
    """Numbers of two ascending lists, each once and ascending; returns how many there are."""
    i, j, n = 0, 0, 0
    while i < len(one) or j < len(other):
        if j == len(other) or (i < len(one) and one[i] <= other[j]):
            j += j < len(other) and one[i] == other[j]
            union[n] = one[i]
            i += 1
        else:
            union[n] = other[j]
            j += 1
        n += 1
    return n


@njit(nogil=True, cache=True)
def fold(union: Any, out: Any, indices: Any, values: Any) -> None:
    """Add blocks to a sum of blocks.

    Args:
        union: ascending numbers of the sum's blocks, each once.
        out: the sum, one row a block.
        indices: ascending numbers, all of them in ``union``.
        values: their blocks.
    """
    at = 0
    for n in range(len(indices)):
        while union[at] < indices[n]:
            at += 1
        for j in range(out.shape[1]):
            out[at, j] += values[n, j]


@njit(nogil=True, cache=True)
def add_blocks(out: Any, indices: Any, values: Any) -> None:
    """``out[indices] += values``, block by block, both flat."""
    block = len(values) // max(len(indices), 1)
    for n in range(len(indices)):
        if n + SOON < len(indices):
            prefetch(out, indices[n + SOON] * block)
        begin, to = indices[n] * block, n * block
        j = 0
        while j + WIDTH <= block:
            store(out, begin + j, add(load(out, begin + j), load(values, to + j)))
            j += WIDTH
        while j < block:
            out[begin + j] += values[to + j]
            j += 1
