"""Vectors of bf16 in compiled loops: their memory, their transposition, and what multiplies them.

Only loops import this file, which loads numba. Numbers are arrays of the bits of bf16. AVX-512
multiplies 32 pairs of them at once and adds the exact products, two and two, to 16 sums in fp32
(`vdpbf16ps`). So that the numbers of one column lie side by side, matrices are transposed first,
in blocks of 16 × 16 that are exchanged between registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.np import arrayobj

from axsparse.samo.host.compiled_loops import BARE, Array

BLOCK = 16
"""Rows and columns that are transposed at once."""
PAIRS = 32
"""Products of one instruction, and numbers of a vector."""
SUMS = 16
"""Sums of one instruction."""

FLOAT, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
# None of these is typed.
_arrays: Any = arrayobj
_cgutils: Any = cgutils
_extending: Any = extending
BFLOAT: Any = ir.Type()
"""LLVM's own type for bf16, which llvmlite has not."""
BFLOAT._to_string = lambda: "bfloat"
intrinsic = _extending.intrinsic
alloca_once, for_range = _cgutils.alloca_once, _cgutils.for_range


def place(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: ir.VectorType) -> Any:
    """The address of a vector that begins at an entry of an array."""
    entries = _arrays.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(entries, [at]), vector.as_pointer())


def picks(places: Any) -> ir.Constant:
    """Which entries of two vectors a shuffle takes."""
    chosen = list(places)
    return ir.Constant(ir.VectorType(INT32, len(chosen)), chosen)


def alike(builder: Any, number: Any, lanes: int) -> Any:
    """A vector whose entries are all one number."""
    nothing = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, number, INT32(0))
    return builder.shuffle_vector(first, nothing, picks([0] * lanes))


def outside(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = _cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def fetch(builder: Any, address: Any) -> None:
    """Have the processor fetch memory that will soon be read, which may lie beyond an array."""
    byte = builder.bitcast(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [byte.type, INT32, INT32, INT32])
    function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [byte, INT32(0), INT32(3), INT32(1)])


def multiply_add(builder: Any, sums: Any, one: Any, other: Any) -> Any:
    """`sums` and the products of two vectors of PAIRS numbers, two and two."""
    return outside(builder, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, [sums, one, other])


# Reason: two arrays, where to begin in each, and how far rows are apart in each.
def _turn(_: Any, source: Any, at: Any, apart: Any, target: Any, to: Any, target_apart: Any) -> Any:
    """Transpose one block: rows at `at`, `at + apart`, … become columns of the rows at `to`, …"""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, apart, target, to, target_apart = arguments
        vector = ir.VectorType(INT16, BLOCK)

        def row_of(kind: Any, array: Any, first: Any, stride: Any, row: int) -> Any:
            begin = builder.add(first, builder.mul(stride, INT64(row)))
            return place(context, builder, kind, array, begin, vector)

        rows = [
            builder.load(row_of(signature.args[0], source, at, apart, row), align=2)
            for row in range(BLOCK)
        ]
        # The next block of the same columns is on its way meanwhile.
        for row in range(BLOCK, 2 * BLOCK):
            ahead = row_of(signature.args[0], source, at, apart, row)
            fetch(builder, ahead)
        # Quarters of ever smaller squares change places, those off the diagonal.
        half = BLOCK // 2
        while half:
            low = picks(k if not k & half else BLOCK + (k ^ half) for k in range(BLOCK))
            high = picks(k | half if not k & half else BLOCK + k for k in range(BLOCK))
            for row in range(BLOCK):
                if not row & half:
                    pair = rows[row], rows[row + half]
                    rows[row] = builder.shuffle_vector(*pair, low)
                    rows[row + half] = builder.shuffle_vector(*pair, high)
            half //= 2
        for row in range(BLOCK):
            where = row_of(signature.args[3], target, to, target_apart, row)
            builder.store(rows[row], where, align=2)
        return context.get_dummy_value()

    return types.void(source, at, apart, target, to, target_apart), call


turn = intrinsic(_turn)


def _transpose(source: Array, target: Array, begin: int, end: int, first: int) -> None:
    """Write rows [begin, end) of a matrix, `(rows, columns)`, from column `first` on, to the
    columns of `target`, `(columns, length)`, whose further columns become zero."""
    columns, length = target.shape
    apart = source.shape[1]
    whole_rows = (end - begin) // BLOCK * BLOCK
    whole_columns = columns // BLOCK * BLOCK
    for row in range(0, whole_rows, BLOCK):
        for column in range(0, whole_columns, BLOCK):
            at = (begin + row) * apart + first + column
            turn(source, at, apart, target, column * length + row, length)
    for column in range(columns):
        for row in range(0 if column >= whole_columns else whole_rows, length):
            target[column, row] = source[begin + row, first + column] if begin + row < end else 0


transpose = njit(nogil=True, **BARE)(_transpose)
