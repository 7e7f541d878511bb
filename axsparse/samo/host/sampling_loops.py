"""The loops of `sampled_product.py`; only the process that compiles them imports this file."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from axsparse.samo.host.bf16_loops import LENGTHS
from axsparse.samo.host.bf16_vectors import (
    BFLOAT,
    FLOAT,
    INT32,
    INT64,
    PAIRS,
    SUMS,
    intrinsic,
    multiply_add,
    picks,
    place,
)
from axsparse.samo.host.compiled_loops import BARE, Array

CHAINS = 2
"""Sums of one entry that are made side by side, so that instructions wait less for each other."""


def _dot_of(instructions: int) -> Any:
    """What makes the sum of PAIRS · `instructions` products of two vectors, as fp32."""

    def dot(_: Any, one: Any, at_one: Any, other: Any, at_other: Any) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sums, factors = ir.VectorType(FLOAT, SUMS), ir.VectorType(BFLOAT, PAIRS)
            totals = [ir.Constant(sums, [0.0] * SUMS)] * CHAINS
            for number in range(instructions):
                read = []
                for side in (0, 2):
                    at = builder.add(arguments[side + 1], INT64(number * PAIRS))
                    where = place(
                        context, builder, signature.args[side], arguments[side], at, factors
                    )
                    read.append(builder.load(where, align=2))
                chain = number % CHAINS
                totals[chain] = multiply_add(builder, totals[chain], *read)
            return _sum(builder, builder.fadd(*totals))

        return types.float32(one, at_one, other, at_other), call

    return intrinsic(dot)


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's entries: halves are added until one is left."""
    lanes = SUMS
    while lanes > 1:
        nothing = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, nothing, picks(range(begin, begin + lanes // 2)))
            for begin in (0, lanes // 2)
        ]
        vector, lanes = builder.fadd(*halves), lanes // 2
    return builder.extract_element(vector, INT32(0))


_dot_of_64, _dot_of_128, _dot_of_256 = (_dot_of(length // PAIRS) for length in LENGTHS)


def _sample(
    panels: tuple[Array, Array],
    first: int,
    where: tuple[Array, Array, Array],
    sums: Array,
    adds: int,
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
    limit = first + inner.shape[0]
    for row in range(outer.shape[0]):
        at, number, end = row * length, cursors[row], ends[row]
        while number < end and columns[number] < limit:
            place = (columns[number] - first) * length
            if length == 256:
                value = _dot_of_256(inner, place, outer, at)
            elif length == 128:
                value = _dot_of_128(inner, place, outer, at)
            else:
                value = _dot_of_64(inner, place, outer, at)
            sums[number] = sums[number] + value if adds else value
            number += 1
        cursors[row] = number


sample = njit(nogil=True, **BARE)(_sample)
