"""The loops of `kept_matrix.py` for AVX2: products of a few tokens with a matrix of which only the
kept entries are stored.

Only the process that compiles loops imports this file. Values are bf16, as their bits; sums are
fp32. A mask says for 64 columns at a time which entries of a row are kept; a shuffle of bytes
(`vpshufb`), whose control a table has, moves values to 8 columns at a time.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.host.decode_parts import (
    address_of,
    bf16_at,
    fp32_at,
    int32_at,
    int64_at,
    put_fp32,
    put_output,
)
from axsparse.samo.host.kept_encodings import GROUP, ROWS, SUMS, WORD
from axsparse.samo.host.loop_parts import (
    FLOAT,
    INT8,
    INT32,
    INT64,
    alloca_once,
    compiled,
    fetch,
    for_range,
    intrinsic,
    lane_sum,
    outside,
    picks,
    vector_pointer,
)

LANES = 8
"""Numbers of a vector."""
CHAINS = 2
"""Sums of a token that are made side by side, so that instructions wait less for each other."""
AHEAD = 512
"""Values from what is multiplied to what is fetched into the cache meanwhile."""


def _shuffles() -> Array:
    """For each byte of a mask, the control of a shuffle that moves bf16 values to the upper halves
    of the fp32 numbers of their columns, and zero to the other bytes."""
    table = np.full((256, 32), 0x80, np.uint8)
    for byte in range(256):
        kept = [column for column in range(8) if byte >> column & 1]
        for number, column in enumerate(kept):
            table[byte, 4 * column + 2 : 4 * column + 4] = 2 * number, 2 * number + 1
    return table.reshape(-1)


SHUFFLES = _shuffles()
CONTROL_BITS = 5
"""A control has 1 << 5 bytes."""


def _multiply_add(builder: Any, one: Any, other: Any, total: Any) -> Any:
    name = f"llvm.fmuladd.v{total.type.count}f32"
    return outside(builder, name, total.type, [one, other, total])


# Reason: two arrays by their addresses, and the layout of the second.
@compiled
def lay_out(
    x: int, is_bf16: int, tokens: int, columns: int, wide: int, apart: int, next_column: int
) -> None:
    """Write tokens, `(tokens, columns)` in bf16 or fp32, to an array of fp32: tokens are `apart`
    entries from each other, and columns `next_column`."""
    for token in range(tokens):
        for column in range(columns):
            entry = token * columns + column
            number = bf16_at(x, entry) if is_bf16 else fp32_at(x, entry)
            put_fp32(wide, token * apart + column * next_column, number)


# -- kept entries by a mask -----------------------------------------------------------------------


def _expand(builder: Any, word: Any, number: Any, read: Any, table: Any) -> list[Any]:
    """The fp32 weights of a word's columns, 8 at a time; `read(number, kind)` loads the values from
    a number on."""
    weights = []
    half, control = ir.VectorType(INT8, 16), ir.VectorType(INT8, 32)
    for group in range(WORD // LANES):
        shift = 8 * group - CONTROL_BITS
        moved = builder.lshr(word, INT64(shift)) if group else builder.shl(word, INT64(-shift))
        begin = builder.and_(moved, INT64(255 << CONTROL_BITS))
        values = read(number, half)
        twice = builder.shuffle_vector(values, values, picks([*range(16)] * 2))
        where = builder.bitcast(builder.gep(table, [begin]), control.as_pointer())
        arguments = [twice, builder.load(where, align=1)]
        expanded = outside(builder, "llvm.x86.avx2.pshuf.b", control, arguments)
        weights.append(builder.bitcast(expanded, ir.VectorType(FLOAT, 8)))
        number = builder.add(number, builder.ctpop(begin))
    return weights


# Reason: one loop in instructions, which are emitted in their order.
def _masked_rows(tokens: int) -> Any:
    """A function for the products of `ROWS` rows with `tokens` tokens."""
    vector = ir.VectorType(FLOAT, LANES)
    zero = ir.Constant(vector, [0.0] * LANES)
    chains = CHAINS if tokens == 1 else 1

    # Reason: addresses of the tokens, of the rows' words and first value, and of the sums.
    def multiply(_: Any, x: Any, bits: Any, words: Any, values: Any, out: Any, tab: Any) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, bits, words, values, out, table = arguments
            controls = vector_pointer(context, builder, signature.args[5], table, INT64(0), INT8)
            sums = [
                [[alloca_once(builder, vector) for _ in range(chains)] for _ in range(tokens)]
                for _ in range(ROWS)
            ]
            for each in (each for row in sums for token in row for each in token):
                builder.store(zero, each)
            number = alloca_once(builder, INT64)
            builder.store(INT64(0), number)
            width = builder.mul(words, INT64(WORD))

            def read(entry: Any, kind: Any) -> Any:
                return builder.load(address_of(builder, values, entry, 2, kind), align=2)

            with for_range(builder, words) as loop:
                before, expanded = builder.load(number), []
                ahead = builder.add(before, INT64(AHEAD))
                fetch(builder, address_of(builder, values, ahead, 2, INT8))
                for row in range(ROWS):
                    entry = builder.add(builder.mul(loop.index, INT64(ROWS)), INT64(row))
                    word = builder.load(address_of(builder, bits, entry, 8, INT64), align=8)
                    expanded.append(_expand(builder, word, before, read, controls))
                    before = builder.add(before, builder.ctpop(word))
                builder.store(before, number)
                begin = builder.mul(loop.index, INT64(WORD))
                for group in range(WORD // LANES):
                    column = builder.add(begin, INT64(LANES * group))
                    for token in range(tokens):
                        entry = builder.add(column, builder.mul(width, INT64(token)))
                        factor = builder.load(address_of(builder, x, entry, 4, vector), align=4)
                        for row, weights in enumerate(expanded):
                            total = sums[row][token][group % chains]
                            now = builder.load(total)
                            added = _multiply_add(builder, weights[group], factor, now)
                            builder.store(added, total)
            for row in range(ROWS):
                for token in range(tokens):
                    result = reduce(builder.fadd, map(builder.load, sums[row][token]))
                    entry = INT64(row * tokens + token)
                    where = address_of(builder, out, entry, 4, FLOAT)
                    builder.store(lane_sum(builder, result), where)
            return context.get_dummy_value()

        return types.void(x, bits, words, values, out, tab), call

    return intrinsic(multiply)


_masked_1, _masked_4 = _masked_rows(1), _masked_rows(4)


# Reason: arrays by their addresses, their sizes, and the rows of a thread.
@compiled
def multiply_masked(
    x: int,
    bias: int,
    out: int,
    is_bf16: int,
    tokens: int,
    matrix: int,
    scratch: int,
    begin: int,
    end: int,
) -> None:
    """Write `x Wᵀ + bias` for rows [begin, end) of a matrix to `out`, `(tokens, rows)`.

    `x`, `(tokens, columns)`, `bias`, `(rows,)` or 0, and `out` are bf16 or fp32. `matrix` has five
    int64: addresses of the bf16 values of kept entries, of their places and of the number of the
    first value of each two rows, int32; then rows and columns. Places are words of 64 columns:
    one word of each of two rows, then the next ones; values are in the same order. `begin` is
    even. Before and behind the values, 32 more may be read. `scratch` is for `SUMS` fp32 numbers
    and the tokens in whole words.
    """
    values, mask, first = int64_at(matrix, 0), int64_at(matrix, 1), int64_at(matrix, 2)
    rows, columns = int64_at(matrix, 3), int64_at(matrix, 4)
    words = (columns + WORD - 1) // WORD
    wide, width = scratch + 4 * SUMS, WORD * words
    lay_out(x, is_bf16, tokens, columns, wide, width, 1)
    for token in range(tokens):
        for column in range(columns, width):
            put_fp32(wide, token * width + column, np.float32(0))
    for row in range(begin, end, ROWS):
        at, bits = values + 2 * int32_at(first, row // ROWS), mask + 8 * words * row
        token = 0
        while token < tokens:
            here = wide + 4 * width * token
            count = 4 if token + 4 <= tokens else 1
            if count == 4:
                _masked_4(here, bits, words, at, scratch, SHUFFLES)
            else:
                _masked_1(here, bits, words, at, scratch, SHUFFLES)
            for each in range(row, min(row + ROWS, end)):
                for number in range(count):
                    total = fp32_at(scratch, count * (each - row) + number)
                    put_output(total, bias, each, out, is_bf16, (token + number) * rows + each)
            token += count


# -- kept entries by a list of columns ------------------------------------------------------------


def _listed_row(lanes: int) -> Any:
    """A function for the products of one row with `lanes` tokens.

    With one token each vector has the products of one entry in its first lane. To read four values
    and clear all but the upper half of each is one instruction, since they are read from two
    bytes before the entry; what the other lanes have is of no meaning.
    """
    vector = ir.VectorType(FLOAT, max(lanes, 4))
    zero = ir.Constant(vector, [0.0] * vector.count)
    words = ir.VectorType(INT32, 4)
    upper = ir.Constant(words, [0xFFFF0000] * 4)

    # Reason: addresses of the tokens, of all values and steps, the bounds of the row's, and the
    # address of its results.
    def multiply(_: Any, x: Any, values: Any, steps: Any, at: Any, end: Any, out: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            x, values, steps, at, end, out = arguments
            sums = [alloca_once(builder, vector) for _ in range(GROUP)]
            for each in sums:
                builder.store(zero, each)
            last = alloca_once(builder, INT64)
            builder.store(INT64(-1), last)
            groups = builder.udiv(builder.sub(end, at), INT64(GROUP))
            with for_range(builder, groups) as loop:
                begin = builder.add(at, builder.mul(loop.index, INT64(GROUP)))
                column = builder.load(last)
                for number, total in enumerate(sums):
                    entry = builder.add(begin, INT64(number))
                    step = builder.load(address_of(builder, steps, entry, 1, INT8))
                    column = builder.add(column, builder.zext(step, INT64))
                    before = builder.sub(entry, INT64(1))
                    bits = builder.load(address_of(builder, values, before, 2, words), align=2)
                    weight = builder.bitcast(builder.and_(bits, upper), ir.VectorType(FLOAT, 4))
                    where = address_of(builder, x, column, 4 * lanes, vector)
                    factor = builder.load(where, align=4)
                    if lanes > 1:
                        weight = builder.shuffle_vector(weight, weight, picks([0] * lanes))
                    added = _multiply_add(builder, weight, factor, builder.load(total))
                    builder.store(added, total)
                builder.store(column, last)
            total = reduce(builder.fadd, map(builder.load, sums))
            builder.store(total, builder.inttoptr(out, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(x, values, steps, at, end, out), call

    return intrinsic(multiply)


_listed_1, _listed_4, _listed_8 = _listed_row(1), _listed_row(4), _listed_row(8)


# Reason: arrays by their addresses, their sizes, and the rows of a thread.
@compiled
def multiply_listed(
    x: int,
    bias: int,
    out: int,
    is_bf16: int,
    tokens: int,
    matrix: int,
    scratch: int,
    begin: int,
    end: int,
) -> None:
    """Do what `multiply_masked` does, where places are the distances of each entry's column from
    the last one's, one byte each; each row has a multiple of four entries."""
    values, steps, first = int64_at(matrix, 0), int64_at(matrix, 1), int64_at(matrix, 2)
    rows, columns = int64_at(matrix, 3), int64_at(matrix, 4)
    wide, sums, size = scratch + 4 * SUMS, scratch, 2 if is_bf16 else 4
    done = 0
    while done < tokens:
        left = tokens - done
        lanes = 1 if left == 1 else 4 if left <= 4 else 8
        count = min(left, lanes)
        lay_out(x + size * columns * done, is_bf16, count, columns, wide, 1, lanes)
        for token in range(count, lanes):
            for column in range(columns):
                put_fp32(wide, lanes * column + token, np.float32(0))
        for row in range(begin, end):
            at, past = int32_at(first, row), int32_at(first, row + 1)
            if lanes == 1:
                _listed_1(wide, values, steps, at, past, sums)
            elif lanes == 4:
                _listed_4(wide, values, steps, at, past, sums)
            else:
                _listed_8(wide, values, steps, at, past, sums)
            for token in range(count):
                total = fp32_at(sums, token)
                put_output(total, bias, row, out, is_bf16, (done + token) * rows + row)
        done += count
