"""LLVM code of vectors of float32: their type in Numba, and the helpers that emit the operations of :mod:`.simd`.

Import this module only where Numba is.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import DataModelManager
from numba.core.typing import Signature
from numba.extending import intrinsic, models, register_model

__all__ = [
    "FLOAT",
    "LANES",
    "VECTOR",
    "WIDTH",
    "Kernel",
    "Operation",
    "Value",
    "Vector",
    "as_vectors",
    "bits_of",
    "call_llvm",
    "in_all_lanes",
    "operation",
    "signature_of",
]

WIDTH = 8
"""Elements of a vector: 32 bytes, which every processor with such vectors supports."""

FLOAT = ir.FloatType()
LANES = ir.VectorType(FLOAT, WIDTH)

Codegen = Callable[..., ir.Value]
Operation = tuple[Signature, Codegen]
"""An intrinsic: its signature, and the function that emits its code from context, builder, signature and arguments."""

Value = Any
"""A number in a loop, or a vector of numbers, for which Numba has no Python type."""

Kernel = Callable[..., Value]
"""An intrinsic as loops call it, with values; it is declared with the typing context and their types."""


def operation(declared: Callable[..., Operation]) -> Kernel:
    """Declare an operation on numbers and vectors."""
    return cast(Kernel, intrinsic(declared))


class Vector(types.Type):
    """Numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"Vector(float32 x {WIDTH})")


VECTOR = Vector()


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: DataModelManager, kind: Vector) -> None:
        super().__init__(manager, kind, LANES)


def signature_of(*given: types.Type) -> Signature:
    """Return the signature of an operation: its result is a vector if an argument is one."""
    kinds = [kind if isinstance(kind, Vector) else types.float32 for kind in given]
    return (VECTOR if VECTOR in kinds else types.float32)(*kinds)


def in_all_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return a vector that has a number in each lane."""
    undefined, lanes = ir.Constant(LANES, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, lanes)


def as_vectors(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Return all values as vectors if one of them is."""
    if all(value.type == FLOAT for value in values):
        return list(values)
    return [in_all_lanes(builder, value) if value.type == FLOAT else value for value in values]


def call_llvm(
    builder: ir.IRBuilder,
    name: str,
    values: list[ir.Value],
    result: ir.Type | None = None,
    fastmath: tuple[str, ...] = (),
) -> ir.Value:
    """Call an LLVM function that has a name for each type."""
    kind = values[-1].type
    suffix = f"v{WIDTH}f32" if kind == LANES else "f32"
    signature = ir.FunctionType(result or kind, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, values, fastmath=fastmath)


def bits_of(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, Callable[[int], ir.Constant]]:
    """Return the bits of a number or of each lane, and a function that makes a constant of that type."""
    kind = ir.IntType(32) if x.type == FLOAT else ir.VectorType(ir.IntType(32), WIDTH)
    return builder.bitcast(x, kind), lambda n: ir.Constant(kind, n if x.type == FLOAT else [n] * WIDTH)
