"""Loops of block top-k on CPU in Numba that read messages and add them up, with LLVM's vectors.

Their results are bitwise those of :mod:`lightning_hetero.compression.reference`. They touch chosen blocks only. Import
this module only where Numba is.

====================  =========================================================
kernel                what it does
====================  =========================================================
``checksum``          both sums of a message
``read``              numbers and values of a message, if it is valid
``unite``             numbers of the blocks of two messages
``fold``              adds blocks into a sum that has their numbers
``add_blocks``        adds blocks to a sum of the model's size
====================  =========================================================
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from lightning_hetero.compression.message_header import HEADER_BYTES, HEADER_WEIGHTS
from lightning_hetero.compression.numba_jit.encode_kernels import BFLOAT16, FLOAT32, LARGEST, Bytes, Floats
from lightning_hetero.compression.numba_jit.simd import PREFETCH_BLOCKS, WIDTH, add, from_high, load, prefetch, store
from lightning_hetero.compression.selectors import Indices
from lightning_hetero.compression.wire_format import SEGMENT_BLOCKS

__all__ = ["add_blocks", "checksum", "fold", "read", "unite"]

# In the order of the header's fields: address, step, flags, number of blocks.
WEIGHT_0, WEIGHT_1, WEIGHT_2, WEIGHT_3 = map(np.int64, HEADER_WEIGHTS)


@njit(nogil=True, cache=True)
def checksum(payload: Bytes) -> tuple[np.int64, np.int64]:
    """Return ``(sum w_i, sum (i + 1) w_i)`` of the 32-bit words of bytes, modulo 2^64."""
    words = payload.view(np.int32)
    first, second = np.int64(0), np.int64(0)
    for i in range(len(words)):
        word = np.int64(words[i])
        first += word
        second += word * np.int64(i + 1)
    return first, second


@njit(nogil=True, cache=True)
def read(
    message: Bytes, due: tuple[int, int, int, int], segments: int, places_at: int, values_at: int, scales_at: int,
    num_blocks: int, kind: int, indices: Indices, values: Floats,
) -> int:  # fmt: skip
    """Read numbers and values of a message that has a list of indices, and check them as ``MessageFormat.read`` does.

    Args:
        message: uint8.
        due: expected magic and version, address, step and fingerprint.
        segments: segments of the table of segments, which follows the header.
        places_at: first byte of indices.
        values_at: first byte of values.
        scales_at: first byte of scales.
        num_blocks: blocks of the model.
        kind: kind of values.
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
def _numbers(
    counts: npt.NDArray[np.int32], places: npt.NDArray[np.uint16], count: int, num_blocks: int, indices: Indices
) -> bool:
    """Write the numbers of blocks from the table of segments and the places in them; return whether they ascend."""
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
def _values(message: Bytes, values_at: int, scales_at: int, kind: int, values: Floats, block: int) -> bool:
    """Write the values of a message in float32; return whether they are finite."""
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
    strange = 0  # counted to the end: LLVM vectorizes the loop only without an early exit
    for i in range(size):
        strange += 0 if abs(values[i]) <= LARGEST else 1
    return strange == 0


@njit(nogil=True, cache=True)
def unite(one: Indices, other: Indices, union: Indices) -> int:
    """Write the numbers of two ascending lists, each once and ascending; return how many there are."""
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
def fold(union: Indices, out: Floats, indices: Indices, values: Floats) -> None:
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
def add_blocks(out: Floats, indices: Indices, values: Floats) -> None:
    """Apply ``out[indices] += values``, block by block, both flat."""
    block = len(values) // max(len(indices), 1)
    for n in range(len(indices)):
        if n + PREFETCH_BLOCKS < len(indices):
            prefetch(out, indices[n + PREFETCH_BLOCKS] * block)
        begin, to = indices[n] * block, n * block
        j = 0
        while j + WIDTH <= block:
            store(out, begin + j, add(load(out, begin + j), load(values, to + j)))
            j += WIDTH
        while j < block:
            out[begin + j] += values[to + j]
            j += 1
