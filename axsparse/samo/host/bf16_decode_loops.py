"""The loops of `kept_matrix.py` for AVX-512 with products of bf16 (`vdpbf16ps`): products of a few
tokens with a matrix of which only the kept entries are stored.

Only the process that compiles loops imports this file. Inputs in fp32 are taken apart into three
numbers of bf16 whose sum they are, and each is multiplied like a token of its own.

Values come to their columns, or to their rows, by an instruction that expands them (`vpexpandw`).
Four at a time are one block, which the compiler does not reorder (docs/decisions/056-decoding.md).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from axsparse.samo.host.decode_parts import (
    Numbers,
    address_of,
    bf16_at,
    fp32_at,
    int32_at,
    int64_at,
    load,
    masked_product,
    put_outputs,
    put_upper,
    store_sums,
    variables,
)
from axsparse.samo.host.kept_encodings import PARTS, ROWS, SLICE, SUMS, WORD
from axsparse.samo.host.loop_parts import (
    BFLOAT,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    add_bf16_products,
    compiled,
    fetch,
    for_range,
    intrinsic,
    outside,
)

AHEAD = 512
"""Values from what is multiplied to what is fetched into the cache meanwhile."""

_WORDS, _BYTES = ir.VectorType(INT16, 32), ir.VectorType(INT8, 32)
_FACTORS, _TOTALS = ir.VectorType(BFLOAT, 32), ir.VectorType(FLOAT, 16)
_KIND = {_WORDS: "w", _BYTES: "b"}


def _expanded(builder: Any, values: list[Any], kept: list[Any]) -> list[Any]:
    """Four vectors whose kept places, by the bits of an int32 each, have values in their order; the
    other places are zero."""
    lines = [
        f"vpexpand{_KIND[vector.type]} ${4 + number}, ${number}{{${8 + number}}}{{z}}"
        for number, vector in enumerate(values)
    ]
    kinds = [vector.type for vector in values]
    function = ir.FunctionType(ir.LiteralStructType(kinds), [*kinds, *[INT32] * 4])
    constraints = ",".join(["=&v"] * 4 + ["v"] * 4 + ["^Yk"] * 4)
    found = builder.asm(function, "\n".join(lines), constraints, [*values, *kept], False)
    return [builder.extract_value(found, number) for number in range(4)]


def _multiply_add(builder: Any, total: Any, weights: Any, inputs: Any) -> None:
    """Add the products of 32 weights and inputs, two and two, to a variable's 16 sums."""
    factors = [builder.bitcast(each, _FACTORS) for each in (weights, inputs)]
    builder.store(add_bf16_products(builder, builder.load(total), *factors), total)


@compiled
def lay_out(x: int, is_bf16: int, tokens: int, columns: int, inputs: int, width: int) -> int:
    """Write tokens, `(tokens, columns)` in bf16 or fp32, to an array of bf16 whose rows are of
    `width`, filled up with zeros; returns the rows of a token."""
    parts = 1 if is_bf16 else PARTS
    for token in range(tokens):
        for column in range(columns):
            entry, place = token * columns + column, token * parts * width + column
            if is_bf16:
                put_upper(inputs, place, bf16_at(x, entry))
            else:
                rest = fp32_at(x, entry)
                for part in range(PARTS):
                    put_upper(inputs, place + part * width, rest)
                    rest = rest - bf16_at(inputs, place + part * width)
                    if rest != rest:  # the number is infinite, or is none
                        rest = np.float32(0)
        for part in range(parts):
            for column in range(columns, width):
                put_upper(inputs, (token * parts + part) * width + column, np.float32(0))
    return parts


# -- kept entries by a mask -----------------------------------------------------------------------


# Reason: one loop in instructions, which are emitted in their order.
def _masked_rows(tokens: int) -> Any:
    """A function for the products of `ROWS` rows with `tokens` tokens."""

    # Reason: addresses of the tokens, of the rows' words and first value, and of the sums.
    def multiply(_: Any, x: Any, width: Any, bits: Any, words: Any, values: Any, out: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            x, width, bits, words, values, out = arguments
            sums = [[variables(builder, 2, _TOTALS) for _ in range(ROWS)] for _ in range(tokens)]
            [number] = variables(builder, 1, INT64)
            with for_range(builder, words) as loop:
                at, vectors, kept = builder.load(number), [], []
                ahead = builder.add(at, INT64(AHEAD))
                fetch(builder, address_of(builder, values, ahead, 2, INT8))
                for row in range(ROWS):
                    entry = builder.add(builder.mul(loop.index, INT64(ROWS)), INT64(row))
                    word = load(builder, bits, entry, 8, INT64)
                    kept += [
                        builder.trunc(builder.lshr(word, INT64(begin)), INT32) for begin in (0, 32)
                    ]
                    middle = builder.add(at, builder.zext(builder.ctpop(kept[-2]), INT64))
                    vectors += [load(builder, values, each, 2, _WORDS) for each in (at, middle)]
                    at = builder.add(at, builder.ctpop(word))
                builder.store(at, number)
                weights = _expanded(builder, vectors, kept)
                column = builder.mul(loop.index, INT64(WORD))
                for token in range(tokens):
                    entry = builder.add(column, builder.mul(width, INT64(token)))
                    for half in range(2):
                        place = builder.add(entry, INT64(32 * half))
                        inputs = load(builder, x, place, 2, _WORDS)
                        for row in range(ROWS):
                            total = sums[token][row][half]
                            _multiply_add(builder, total, weights[2 * row + half], inputs)
            store_sums(builder, chain.from_iterable(sums), out)
            return context.get_dummy_value()

        return types.void(x, width, bits, words, values, out), call

    return intrinsic(multiply)


multiply_masked = masked_product(2, lay_out, _masked_rows(1), _masked_rows(4))


# -- kept entries by slices of rows ---------------------------------------------------------------


# Reason: one loop in instructions, which are emitted in their order.
def _sliced_rows(tokens: int) -> Any:
    """A function for the products of a slice with `tokens` tokens.

    A step has up to two entries of each row, whose columns are among the 64 from the step's first
    column on; an instruction (`vpermi2w`) takes the inputs of these columns out of two vectors.
    """

    # Reason: addresses of the tokens, of the steps and entries of the slice, and of the sums.
    def multiply(
        _: Any, x: Any, width: Any, about: Any, at: Any, step: Any, steps: Any, out: Any
    ) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            x, width, about, at, step, steps, out = arguments
            values, columns, masks, moves = (
                load(builder, about, INT64(number), 8, INT64) for number in range(4)
            )
            sums = [variables(builder, 2, _TOTALS) for _ in range(tokens)]
            number, first = variables(builder, 2, INT64)
            builder.store(at, number)
            with for_range(builder, builder.udiv(steps, INT64(2))) as loop:
                at, vectors, kept, begins = builder.load(number), [], [], []
                ahead = builder.add(at, INT64(AHEAD))
                fetch(builder, address_of(builder, values, ahead, 2, INT8))
                fetch(builder, address_of(builder, columns, ahead, 1, INT8))
                begin = builder.load(first)
                for half in range(2):
                    entry = builder.add(step, builder.mul(loop.index, INT64(2)))
                    entry = builder.add(entry, INT64(half))
                    mask = load(builder, masks, entry, 4, INT32)
                    kept += [mask, mask]
                    vectors += [
                        load(builder, values, at, 2, _WORDS),
                        load(builder, columns, at, 1, _BYTES),
                    ]
                    at = builder.add(at, builder.zext(builder.ctpop(mask), INT64))
                    move = load(builder, moves, entry, 1, INT8)
                    begin = builder.add(begin, builder.zext(move, INT64))
                    begins.append(begin)
                builder.store(at, number)
                builder.store(begin, first)
                expanded = _expanded(builder, vectors, kept)
                for half, begin in enumerate(begins):
                    weights, places = expanded[2 * half : 2 * half + 2]
                    places = builder.zext(places, _WORDS)
                    for token in range(tokens):
                        entry = builder.add(begin, builder.mul(width, INT64(token)))
                        window = [
                            load(builder, x, builder.add(entry, INT64(more)), 2, _WORDS)
                            for more in (0, 32)
                        ]
                        name = "llvm.x86.avx512.vpermi2var.hi.512"
                        inputs = outside(builder, name, _WORDS, [window[0], places, window[1]])
                        _multiply_add(builder, sums[token][half], weights, inputs)
            for token, pair in enumerate(sums):
                total = builder.fadd(*map(builder.load, pair))
                place = address_of(builder, out, INT64(SLICE * token), 4, _TOTALS)
                builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(x, width, about, at, step, steps, out), call

    return intrinsic(multiply)


_sliced_1, _sliced_4 = _sliced_rows(1), _sliced_rows(4)


@compiled
def multiply_sliced(numbers: Numbers) -> None:
    """The loop for the slices that begin in rows [begin, end).

    `matrix` has eight int64: addresses of the bf16 values of kept entries; of their columns from
    the first of their step on, uint8; of each step's mask of its 32 places, uint32; of the columns
    from the first of one step to the next, uint8; of the numbers of the first value and step of
    each slice, int32; of the rows in the slices' order, int32; then rows and columns. Each slice
    has an even number of steps. Behind values and columns, 32 more may be read.
    """
    x, bias, out, is_bf16, tokens, matrix, scratch, begin, end = numbers
    first, order = int64_at(matrix, 4), int64_at(matrix, 5)
    rows, columns = int64_at(matrix, 6), int64_at(matrix, 7)
    inputs, width = scratch + 4 * SUMS, columns + WORD
    parts = lay_out(x, is_bf16, tokens, columns, inputs, width)
    for number in range(begin // SLICE, (end + SLICE - 1) // SLICE):
        at, step = int32_at(first, 2 * number), int32_at(first, 2 * number + 1)
        steps = int32_at(first, 2 * number + 3) - step
        token = 0
        while token < tokens * parts:
            here, sums = inputs + 2 * width * token, scratch + 4 * SLICE * token
            if token + 4 <= tokens * parts:
                _sliced_4(here, width, matrix, at, step, steps, sums)
                token += 4
            else:
                _sliced_1(here, width, matrix, at, step, steps, sums)
                token += 1
        for lane in range(min(SLICE, rows - SLICE * number)):
            row = int32_at(order, SLICE * number + lane)
            put_outputs(scratch, lane, SLICE, parts, tokens, bias, row, out, is_bf16, rows)
