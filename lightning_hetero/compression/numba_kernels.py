"""Loops of block top-k on CPU in Numba, with LLVM's vectors: one pass over memory where torch takes several.

Bitwise the results of :mod:`lightning_hetero.compression.reference` in residuals and values (torch adds with a fused
multiply-add, and so do these); scores are sums in another order. Import this module only where Numba is.

====================  =========================================================  ===================
kernel                what it does                                               bytes an element
====================  =========================================================  ===================
``accumulate``        ``r += w g`` and block scores; stops before what is not    12.25
                      finite, so that it never enters the residual
``take_float32``,     values of the chosen blocks as they are sent; what         chosen blocks only
``take_bfloat16``,    rounding loses stays in the residual
``take_int8``
``add_blocks``        adds the blocks of a message to the sum                    chosen blocks only
====================  =========================================================  ===================
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["accumulate", "add_blocks", "take_bfloat16", "take_float32", "take_int8"]

LARGEST = np.float32(np.finfo(np.float32).max)
LARGEST_BF16 = np.uint32(0x7F7F0000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer
ZERO, MOST = np.float32(0.0), np.float32(127.0)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _fused_vector(width: int) -> Any:
    """``r[i : i + width] += w g[i : i + width]`` if that is finite; returns ``sum |r|``, which says whether it was."""
    vector = ir.VectorType(ir.FloatType(), width)

    @intrinsic
    def fused(typing: Any, r: Any, g: Any, w: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = [_pointer(context, builder, signature.args[n], args[n], args[3], vector) for n in (0, 1)]
            function = {
                name: cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, given), name)
                for name, kind, given in (
                    (f"llvm.fma.v{width}f32", vector, [vector] * 3),
                    (f"llvm.fabs.v{width}f32", vector, [vector]),
                    (f"llvm.vector.reduce.fadd.v{width}f32", ir.FloatType(), [ir.FloatType(), vector]),
                )
            }
            fma, fabs, total = function.values()
            weight = builder.insert_element(ir.Constant(vector, ir.Undefined), args[2], ir.Constant(ir.IntType(32), 0))
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
            weight = builder.shuffle_vector(weight, ir.Constant(vector, ir.Undefined), lanes)
            value = builder.call(fma, [weight, builder.load(at[1], align=4), builder.load(at[0], align=4)])
            zero = ir.Constant(ir.FloatType(), 0.0)
            score = builder.call(total, [zero, builder.call(fabs, [value])], fastmath=("reassoc",))
            largest = ir.Constant(ir.FloatType(), float(LARGEST))
            with builder.if_then(builder.fcmp_ordered("<=", score, largest), likely=True):
                builder.store(value, at[0], align=4)
            return score

        return types.float32(r, g, types.float32, types.intp), generate

    return fused


fused8, fused16 = _fused_vector(8), _fused_vector(16)


@intrinsic
def fma(typing: Any, w: Any, g: Any, r: Any) -> Any:
    """``w g + r``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def as_bits(typing: Any, x: Any) -> Any:
    """The 32 bits of a number."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """The number that 32 bits are."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@njit(nogil=True, cache=True)
def accumulate(r: Any, g: Any, w: Any, scores: Any, block: int) -> int:
    """``r += w g`` and ``scores``; returns how many elements were added before one that is not finite.

    Args:
        r: residual, whole blocks.
        g: gradient, at most as long.
        w: float32 weight.
        scores: of each block.
        block: elements of a block, a multiple of 8.
    """
    n = len(g)
    for row in range(len(scores)):
        i, end, score = row * block, min((row + 1) * block, n), ZERO
        while i + 16 <= end:
            part = fused16(r, g, w, i)
            if not part <= LARGEST:
                return i
            score += part
            i += 16
        if i + 8 <= end:
            part = fused8(r, g, w, i)
            if not part <= LARGEST:
                return i
            score += part
            i += 8
        while i < end:
            value = fma(w, g[i], r[i])
            if not abs(value) <= LARGEST:
                return i
            r[i] = value
            score += abs(value)
            i += 1
        scores[row] = score
    return n


@njit(nogil=True, cache=True)
def _bf16(x: Any) -> Any:
    """The nearest bfloat16 of a finite number, ties to even, never infinite: its 16 bits."""
    bits = as_bits(x)
    if bits & MAGNITUDE > LARGEST_BF16:
        bits = (bits & ~MAGNITUDE) | LARGEST_BF16
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(nogil=True, cache=True)
def take_float32(blocks: Any, indices: Any, values: Any) -> None:
    """Chosen blocks, which leave the residual.

    Args:
        blocks: residual, one row a block.
        indices: int64 rows.
        values: float32, filled.
    """
    for n in range(len(indices)):
        for j in range(blocks.shape[1]):
            values[n, j] = blocks[indices[n], j]
            blocks[indices[n], j] = ZERO


@njit(nogil=True, cache=True)
def take_bfloat16(blocks: Any, indices: Any, values: Any) -> None:
    """The same in bfloat16, as uint16."""
    for n in range(len(indices)):
        for j in range(blocks.shape[1]):
            sent = _bf16(blocks[indices[n], j])
            values[n, j] = np.uint16(sent)
            blocks[indices[n], j] -= as_float(np.uint32(sent << np.uint32(16)))


@njit(nogil=True, cache=True)
def take_int8(blocks: Any, indices: Any, values: Any, scales: Any) -> None:
    """The same in int8 with a bfloat16 scale for each block, as uint16."""
    for n in range(len(indices)):
        row, largest = indices[n], ZERO
        for j in range(blocks.shape[1]):
            largest = max(largest, abs(blocks[row, j]))
        bits = _bf16(largest / MOST)
        scale = as_float(np.uint32(bits << np.uint32(16)))
        scales[n] = np.uint16(bits)
        for j in range(blocks.shape[1]):
            if scale > ZERO:
                q = min(max((blocks[row, j] / scale + ROUND) - ROUND, -MOST), MOST)
                values[n, j] = np.int8(q)
                blocks[row, j] -= q * scale
            else:
                values[n, j] = np.int8(0)


@njit(nogil=True, cache=True)
def add_blocks(out: Any, indices: Any, values: Any) -> None:
    """``out[indices] += values``, row by row."""
    for n in range(len(indices)):
        for j in range(out.shape[1]):
            out[indices[n], j] += values[n, j]
