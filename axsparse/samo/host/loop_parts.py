"""Building blocks of compiled loops: functions for numba, and vectors of LLVM.

Only the process that compiles loops imports this file and the files of loops, which load numba.
numpy has no bf16, so loops take such numbers as arrays of their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import extending, njit
from numba.core import cgutils
from numba.np import arrayobj

BIT, INT8, INT16, INT32, INT64 = map(ir.IntType, (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
BFLOAT: Any = ir.Type()
"""LLVM's own type for bf16, which llvmlite has not."""
BFLOAT._to_string = lambda: "bfloat"
# None of these is typed.
_arrays: Any = arrayobj
_cgutils: Any = cgutils
_extending: Any = extending
_njit: Any = njit
alloca_once, for_range = _cgutils.alloca_once, _cgutils.for_range
global_constant = _cgutils.global_constant


def compiled(function: Callable[..., Any], **settings: Any) -> Any:
    """A function that numba compiles, without the parts that only Python needs to call it.

    Of an argument that is None, numba leaves out what follows `if argument is not None`.
    """
    bare = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    # In Python's error model every division would be tested for zero, one at a time.
    return _njit(nogil=True, error_model="numpy", **bare, **settings)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function for loops that is written in LLVM's instructions."""
    return _extending.intrinsic(function)


def compiles_to(name: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Marks the function that returns the code to compile for the types of `name`'s arguments."""
    decorate: Callable[[Callable[..., Any]], Any] = _extending.overload(name, strict=False)
    return decorate


# -- vectors ------------------------------------------------------------------------------------


def vector_pointer(
    context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: ir.VectorType
) -> Any:
    """The address of a vector that begins at an entry of an array."""
    entries = _arrays.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(entries, [at]), vector.as_pointer())


def picks(places: Iterable[int]) -> ir.Constant:
    """Which entries of two vectors a shuffle takes."""
    chosen = list(places)
    return ir.Constant(ir.VectorType(INT32, len(chosen)), chosen)


def alike(builder: Any, number: Any, lanes: int) -> Any:
    """A vector whose entries are all one number."""
    nothing = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, number, INT32(0))
    return builder.shuffle_vector(first, nothing, picks([0] * lanes))


def lane_sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's entries: halves are added until one number is left."""
    lanes = vector.type.count
    while lanes > 1:
        nothing = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, nothing, picks(range(begin, begin + lanes // 2)))
            for begin in (0, lanes // 2)
        ]
        vector, lanes = builder.fadd(*halves), lanes // 2
    return builder.extract_element(vector, INT32(0))


def outside(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = _cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def add_bf16_products(builder: Any, sums: Any, one: Any, other: Any) -> Any:
    """16 sums, and the products of two vectors of 32 numbers of bf16, two and two."""
    return outside(builder, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, [sums, one, other])


def fetch(builder: Any, address: Any) -> None:
    """Have the processor fetch memory that will soon be read, which may lie beyond an array."""
    byte = builder.bitcast(address, INT8.as_pointer())
    reading_of_data_in_all_caches = [INT32(0), INT32(3), INT32(1)]
    outside(builder, "llvm.prefetch.p0i8", ir.VoidType(), [byte, *reading_of_data_in_all_caches])
