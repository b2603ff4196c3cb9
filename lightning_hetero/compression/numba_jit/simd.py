"""Vectors of float32 for Numba's loops, which are scalar code without them: a few LLVM operations.

An operation takes numbers, vectors, or both; a number is then spread over all lanes. So one function defines a step for
the lanes of a vector and for the single elements after the last whole one. Nothing is contracted: a product and a sum
are rounded twice, :func:`fma` once. Import this module only where Numba is.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Context, Signature

from lightning_hetero.compression.numba_jit.vector_codegen import (
    FLOAT,
    LANES,
    VECTOR,
    WIDTH,
    Kernel,
    Operation,
    Value,
    as_vectors,
    bits_of,
    call_llvm,
    in_all_lanes,
    operation,
    signature_of,
)

__all__ = [
    "PREFETCH_BLOCKS",
    "WIDTH",
    "Value",
    "absolute",
    "add",
    "any_reaches",
    "bfloat16",
    "div",
    "floats",
    "fma",
    "from_high",
    "high",
    "integers",
    "load",
    "mul",
    "prefetch",
    "spread",
    "sqrt",
    "store",
    "store_high",
    "sub",
    "total",
]

PREFETCH_BLOCKS = 16
"""Blocks to prefetch where they lie far apart."""


def _unary(emit: Callable[[ir.IRBuilder, list[ir.Value]], ir.Value]) -> Kernel:
    @operation
    def emitted(typing: Context, x: types.Type) -> Operation:
        return signature_of(x), lambda context, builder, signature, args: emit(builder, as_vectors(builder, args))

    return emitted


def _binary(name: str) -> Kernel:
    @operation
    def emitted(typing: Context, x: types.Type, y: types.Type) -> Operation:
        return signature_of(x, y), lambda context, builder, signature, args: getattr(builder, name)(
            *as_vectors(builder, args)
        )

    return emitted


add, sub, mul, div = (_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
sqrt = _unary(lambda builder, values: call_llvm(builder, "sqrt", values))
absolute = _unary(lambda builder, values: call_llvm(builder, "fabs", values))


@operation
def fma(typing: Context, x: types.Type, y: types.Type, z: types.Type) -> Operation:
    """Return ``x y + z``, rounded once."""
    return signature_of(x, y, z), lambda context, builder, signature, args: call_llvm(
        builder, "fma", as_vectors(builder, args)
    )


def _bfloat16(builder: ir.IRBuilder, values: list[ir.Value]) -> ir.Value:
    bits, constant = bits_of(builder, values[0])
    sign, largest = builder.and_(bits, constant(0x80000000)), constant(0x7F7F0000)
    over = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), largest)
    bits = builder.select(over, builder.or_(sign, largest), bits)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    near = builder.add(builder.add(bits, constant(0x7FFF)), odd)  # plus half of the last kept place, ties to even
    return builder.bitcast(builder.and_(near, constant(0xFFFF0000)), values[0].type)


bfloat16 = _unary(_bfloat16)
"""Nearest number of bfloat16 to a finite one, ties to even, never infinite."""


def _high(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    bits, constant = bits_of(builder, x)
    kind = ir.IntType(16) if x.type == FLOAT else ir.VectorType(ir.IntType(16), WIDTH)
    return builder.trunc(builder.lshr(bits, constant(16)), kind)


@operation
def high(typing: Context, x: types.Type) -> Operation:
    """Return the upper 16 bits of a number: its bfloat16 bits, if it is representable as bfloat16."""
    return types.uint16(types.float32), lambda context, builder, signature, args: _high(builder, args[0])


@operation
def from_high(typing: Context, bits: types.Type) -> Operation:
    """Return the number with these upper 16 bits, and 0 below."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), FLOAT)

    return types.float32(types.uint16), generate


@operation
def any_reaches(typing: Context, x: types.Type, threshold: types.Type) -> Operation:
    """Return whether a lane of a vector is at least as large as a number."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        mask = builder.bitcast(builder.fcmp_ordered(">=", *as_vectors(builder, args)), ir.IntType(WIDTH))
        return builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(WIDTH), 0))

    return types.boolean(VECTOR, types.float32), generate


@operation
def spread(typing: Context, x: types.Type) -> Operation:
    """Return a vector with a number in each lane."""
    return VECTOR(types.float32), lambda context, builder, signature, args: in_all_lanes(builder, args[0])


@operation
def total(typing: Context, x: types.Type) -> Operation:
    """Return the sum of the lanes, in the processor's order."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        start = ir.Constant(FLOAT, -0.0)
        return call_llvm(builder, "vector.reduce.fadd", [start, *args], FLOAT, fastmath=("reassoc",))

    return types.float32(VECTOR), generate


def _place(
    context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value], kind: ir.Type
) -> ir.Value:
    """Return a pointer to element ``args[1]`` of the array ``args[0]``."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer())


@operation
def load(typing: Context, array: types.Array, i: types.Type) -> Operation:
    """Return the vector that begins at element ``i`` of a float32 array without gaps."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        return builder.load(_place(context, builder, signature, args, LANES), align=4)

    return VECTOR(array, types.intp), generate


@operation
def store(typing: Context, array: types.Array, i: types.Type, x: types.Type) -> Operation:
    """Write a vector to the elements that :func:`load` reads."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        builder.store(args[2], _place(context, builder, signature, args, LANES), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@operation
def store_high(typing: Context, array: types.Array, i: types.Type, x: types.Type) -> Operation:
    """Write the upper 16 bits of each lane to a uint16 array without gaps, from element ``i`` on."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        bits = _high(builder, args[2])
        builder.store(bits, _place(context, builder, signature, args, bits.type), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@operation
def prefetch(typing: Context, array: types.Array, i: types.Type) -> Operation:
    """Prefetch the cache line of element ``i``, which is written soon."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0i8"
        )
        place = _place(context, builder, signature, args, ir.IntType(8))
        builder.call(function, [place, *(ir.Constant(word, n) for n in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _pointer(kind: types.Type) -> Kernel:
    """Return an operation that converts an address to a pointer to numbers of a kind."""

    @operation
    def emitted(typing: Context, address: types.Type) -> Operation:
        def generate(
            context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
        ) -> ir.Value:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    return emitted


_to_floats, _to_integers = _pointer(types.float32), _pointer(types.int64)


@njit(nogil=True, cache=True)
def floats(address: int, size: int) -> npt.NDArray[np.float32]:
    """Return the float32 array at an address, which the caller keeps alive."""
    return carray(_to_floats(address), size)


@njit(nogil=True, cache=True)
def integers(address: int, size: int) -> npt.NDArray[np.int64]:
    """Return the int64 array at an address, which the caller keeps alive."""
    return carray(_to_integers(address), size)
