"""The loops of `sampled_product.py`, which alone imports this file, late, since it loads numba.

Numbers are arrays of the bits of bf16. AVX-512 multiplies 32 pairs of them at once and adds the
exact products, two and two, to 16 sums in fp32 (`vdpbf16ps`). Both factors of a pair must lie at
the same place of two vectors, so matrices are transposed first, in blocks of 16 × 16 that are
exchanged between registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import config, extending, njit, types
from numba.core import cgutils, codegen
from numba.np import arrayobj

from axsparse.samo.index.pieces import Array

FEATURE = "avx512bf16"
BLOCK = 16
"""Rows and columns that are transposed at once."""
PAIRS = 32
"""Products of one instruction."""
SUMS = 16
CHAINS = 2
"""Sums of one entry that are made side by side, so that instructions wait less for each other."""
LENGTHS = (64, 128, 256)
"""The lengths of panels."""

FLOAT, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
# None of these is typed.
_arrays: Any = arrayobj
_cgutils: Any = cgutils
_codegen: Any = codegen
_config: Any = config
_extending: Any = extending
BFLOAT: Any = ir.Type()
"""LLVM's own type for bf16, which llvmlite has not."""
BFLOAT._to_string = lambda: "bfloat"


def has_instruction() -> bool:
    """Whether numba compiles for a processor that multiplies bf16."""
    features = _config.CPU_FEATURES
    known: str = _codegen.get_host_cpu_features() if features is None else features
    return f"+{FEATURE}" in known.split(",")


def _place(
    context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: ir.VectorType
) -> Any:
    """The address of a vector that begins at an entry of an array."""
    entries = _arrays.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(entries, [at]), vector.as_pointer())


def _dot_of(instructions: int) -> Any:
    """What makes the sum of PAIRS · `instructions` products of two vectors, as fp32."""

    def dot(_: Any, one: Any, at_one: Any, other: Any, at_other: Any) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sums, factors = ir.VectorType(FLOAT, SUMS), ir.VectorType(BFLOAT, PAIRS)
            kind = ir.FunctionType(sums, [sums, factors, factors])
            multiply = _cgutils.get_or_insert_function(
                builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"
            )
            totals = [ir.Constant(sums, [0.0] * SUMS)] * CHAINS
            for number in range(instructions):
                read = []
                for side in (0, 2):
                    at = builder.add(arguments[side + 1], INT64(number * PAIRS))
                    where = _place(
                        context, builder, signature.args[side], arguments[side], at, factors
                    )
                    read.append(builder.load(where, align=2))
                chain = number % CHAINS
                totals[chain] = builder.call(multiply, [totals[chain], *read])
            return _sum(builder, builder.fadd(*totals))

        return types.float32(one, at_one, other, at_other), call

    return _extending.intrinsic(dot)


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's entries: halves are added until one is left."""
    lanes = SUMS
    while lanes > 1:
        nothing = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, nothing, _picks(range(begin, begin + lanes // 2)))
            for begin in (0, lanes // 2)
        ]
        vector, lanes = builder.fadd(*halves), lanes // 2
    return builder.extract_element(vector, INT32(0))


def _picks(places: Any) -> ir.Constant:
    """Which entries of two vectors a shuffle takes."""
    chosen = list(places)
    return ir.Constant(ir.VectorType(INT32, len(chosen)), chosen)


# Reason: two arrays, where to begin in each, and how far rows are apart in each.
def _turn(_: Any, source: Any, at: Any, apart: Any, target: Any, to: Any, target_apart: Any) -> Any:
    """Transpose one block: rows at `at`, `at + apart`, … become columns of the rows at `to`, …"""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, apart, target, to, target_apart = arguments
        vector = ir.VectorType(INT16, BLOCK)

        def place(kind: Any, array: Any, first: Any, stride: Any, row: int) -> Any:
            begin = builder.add(first, builder.mul(stride, INT64(row)))
            return _place(context, builder, kind, array, begin, vector)

        rows = [
            builder.load(place(signature.args[0], source, at, apart, row), align=2)
            for row in range(BLOCK)
        ]
        # Quarters of ever smaller squares change places, those off the diagonal.
        half = BLOCK // 2
        while half:
            low = _picks(k if not k & half else BLOCK + (k ^ half) for k in range(BLOCK))
            high = _picks(k | half if not k & half else BLOCK + k for k in range(BLOCK))
            for row in range(BLOCK):
                if not row & half:
                    pair = rows[row], rows[row + half]
                    rows[row] = builder.shuffle_vector(*pair, low)
                    rows[row + half] = builder.shuffle_vector(*pair, high)
            half //= 2
        for row in range(BLOCK):
            where = place(signature.args[3], target, to, target_apart, row)
            builder.store(rows[row], where, align=2)
        return context.get_dummy_value()

    return types.void(source, at, apart, target, to, target_apart), call


_turn_now = _extending.intrinsic(_turn)
_dot_of_64, _dot_of_128, _dot_of_256 = (_dot_of(length // PAIRS) for length in LENGTHS)


def _transpose(source: Array, target: Array, begin: int, end: int, first: int) -> None:
    """Write rows [begin, end) of a matrix, `(rows, columns)`, to the columns of `target`,
    `(columns, length)`, whose further columns become zero."""
    columns, length = target.shape
    apart = source.shape[1]
    flat, turned = source.reshape(-1), target.reshape(-1)
    whole_rows = (end - begin) // BLOCK * BLOCK
    whole_columns = columns // BLOCK * BLOCK
    for row in range(0, whole_rows, BLOCK):
        for column in range(0, whole_columns, BLOCK):
            at = (begin + row) * apart + first + column
            _turn_now(flat, at, apart, turned, column * length + row, length)
    for column in range(columns):
        for row in range(0 if column >= whole_columns else whole_rows, length):
            target[column, row] = source[begin + row, first + column] if begin + row < end else 0


def _sample(
    panels: tuple[Array, Array],
    first: int,
    where: tuple[Array, Array, Array],
    sums: Array,
    adds: bool,
) -> None:
    """The wanted entries of a product, as far as the columns of the inner panel go.

    Both `panels`, the outer `(rows, length)` and the inner `(columns, length)`, are transposed; the
    inner one begins with column `first`. `where` has the columns of all wanted entries, row by row,
    the number of each row's next entry, which is moved on, and that of its end. An entry goes to
    `sums`, or is added to what is there if `adds`.
    """
    outer, inner = panels
    columns, cursors, ends = where
    length = outer.shape[1]
    one, other = inner.reshape(-1), outer.reshape(-1)
    limit = first + inner.shape[0]
    for row in range(outer.shape[0]):
        at, number, end = row * length, cursors[row], ends[row]
        while number < end and columns[number] < limit:
            place = (columns[number] - first) * length
            if length == 256:
                value = _dot_of_256(one, place, other, at)
            elif length == 128:
                value = _dot_of_128(one, place, other, at)
            else:
                value = _dot_of_64(one, place, other, at)
            sums[number] = sums[number] + value if adds else value
            number += 1
        cursors[row] = number


transpose = njit(nogil=True)(_transpose)
sample = njit(nogil=True)(_sample)
