"""Vectors of float32 for Numba's loops, which are scalar code without them: a few operations of LLVM's, and no more.

An operation takes numbers, or vectors, or both, and a number then stands in each lane; so that one function says what a
step does to the lanes of a vector and to the single elements behind the last whole one. Nothing is contracted: a
product and a sum are rounded twice, :func:`fma` once. Import this module only where Numba is.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

__all__ = [
    "WIDTH",
    "absolute",
    "add",
    "div",
    "floats",
    "fma",
    "integers",
    "load",
    "mul",
    "prefetch",
    "spread",
    "sqrt",
    "store",
    "sub",
    "total",
]

WIDTH = 8
"""Elements of a vector: 32 bytes, what every processor with vectors of this kind has."""

FLOAT = ir.FloatType()
LANES = ir.VectorType(FLOAT, WIDTH)


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"Vector(float32 x {WIDTH})")


VECTOR = Vector()


@register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, LANES)


def _typed(*given: Any) -> Any:
    """Signature of an operation: a vector comes out where one goes in."""
    kinds = [kind if isinstance(kind, Vector) else types.float32 for kind in given]
    return (VECTOR if VECTOR in kinds else types.float32)(*kinds)


def _spread(builder: Any, value: Any) -> Any:
    undefined, lanes = ir.Constant(LANES, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, lanes)


def _alike(builder: Any, values: Any) -> list[Any]:
    """All values as vectors if one of them is."""
    if all(value.type == FLOAT for value in values):
        return list(values)
    return [_spread(builder, value) if value.type == FLOAT else value for value in values]


def _call(builder: Any, name: str, values: list[Any], result: Any = None, **flags: Any) -> Any:
    """One of LLVM's functions that have a name for each type."""
    kind = values[-1].type
    suffix = f"v{WIDTH}f32" if kind == LANES else "f32"
    signature = ir.FunctionType(result or kind, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, values, **flags)


def _unary(emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typing: Any, x: Any) -> Any:
        return _typed(x), lambda context, builder, signature, args: emit(builder, _alike(builder, args))

    return operation


def _binary(name: str) -> Any:
    @intrinsic
    def operation(typing: Any, x: Any, y: Any) -> Any:
        return _typed(x, y), lambda context, builder, signature, args: getattr(builder, name)(*_alike(builder, args))

    return operation


add, sub, mul, div = (_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
sqrt = _unary(lambda builder, values: _call(builder, "sqrt", values))
absolute = _unary(lambda builder, values: _call(builder, "fabs", values))


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``x y + z``, rounded once."""
    return _typed(x, y, z), lambda context, builder, signature, args: _call(builder, "fma", _alike(builder, args))


def _bits_of(builder: Any, x: Any) -> tuple[Any, Callable[[int], Any]]:
    """Bits of a number or of each lane, and what makes a constant of that type."""
    kind = ir.IntType(32) if x.type == FLOAT else ir.VectorType(ir.IntType(32), WIDTH)
    return builder.bitcast(x, kind), lambda n: ir.Constant(kind, n if x.type == FLOAT else [n] * WIDTH)


def _bfloat16(builder: Any, values: list[Any]) -> Any:
    bits, constant = _bits_of(builder, values[0])
    sign, largest = builder.and_(bits, constant(0x80000000)), constant(0x7F7F0000)
    over = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), largest)
    bits = builder.select(over, builder.or_(sign, largest), bits)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    near = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    return builder.bitcast(builder.and_(near, constant(0xFFFF0000)), values[0].type)


bfloat16 = _unary(_bfloat16)
"""The nearest number of bfloat16 to a finite one, ties to even, never infinite."""


def _high(builder: Any, x: Any) -> Any:
    bits, constant = _bits_of(builder, x)
    kind = ir.IntType(16) if x.type == FLOAT else ir.VectorType(ir.IntType(16), WIDTH)
    return builder.trunc(builder.lshr(bits, constant(16)), kind)


@intrinsic
def high(typing: Any, x: Any) -> Any:
    """The upper 16 bits of a number: itself in bfloat16, if it is one of these."""
    return types.uint16(types.float32), lambda context, builder, signature, args: _high(builder, args[0])


@intrinsic
def from_high(typing: Any, bits: Any) -> Any:
    """The number whose upper 16 bits these are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def any_reaches(typing: Any, x: Any, threshold: Any) -> Any:
    """Whether a lane of a vector is at least as large as a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = builder.bitcast(builder.fcmp_ordered(">=", *_alike(builder, args)), ir.IntType(WIDTH))
        return builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(WIDTH), 0))

    return types.boolean(VECTOR, types.float32), generate


@intrinsic
def spread(typing: Any, x: Any) -> Any:
    """A number in each lane of a vector."""
    return VECTOR(types.float32), lambda context, builder, signature, args: _spread(builder, args[0])


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """Sum of the lanes, in an order that is the processor's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = ir.Constant(FLOAT, -0.0)
        return _call(builder, "vector.reduce.fadd", [start, *args], FLOAT, fastmath=("reassoc",))

    return types.float32(VECTOR), generate


def _place(context: Any, builder: Any, signature: Any, args: Any, kind: Any) -> Any:
    """Pointer to element ``args[1]`` of the array ``args[0]``."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer())


@intrinsic
def load(typing: Any, array: Any, i: Any) -> Any:
    """The vector that begins at element ``i`` of a float32 array without gaps."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, signature, args, LANES), align=4)

    return VECTOR(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, i: Any, x: Any) -> Any:
    """Write a vector to where :func:`load` reads it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _place(context, builder, signature, args, LANES), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@intrinsic
def store_high(typing: Any, array: Any, i: Any, x: Any) -> Any:
    """Write the upper 16 bits of each lane to element ``i`` and those behind it of a uint16 array without gaps."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _high(builder, args[2])
        builder.store(bits, _place(context, builder, signature, args, bits.type), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@intrinsic
def prefetch(typing: Any, array: Any, i: Any) -> Any:
    """Fetch the cache line of element ``i``, which is written soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0i8"
        )
        place = _place(context, builder, signature, args, ir.IntType(8))
        builder.call(function, [place, *(ir.Constant(word, n) for n in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _pointer(kind: Any) -> Any:
    @intrinsic
    def operation(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    return operation


_to_floats, _to_integers = _pointer(types.float32), _pointer(types.int64)


@njit(nogil=True, cache=True)
def floats(address: int, size: int) -> Any:
    """The float32 array that lies at an address, which somebody else keeps alive."""
    return carray(_to_floats(address), size)


@njit(nogil=True, cache=True)
def integers(address: int, size: int) -> Any:
    """The same of int64."""
    return carray(_to_integers(address), size)
