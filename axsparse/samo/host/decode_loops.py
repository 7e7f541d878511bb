"""The loops of `kept_matrix.py` for AVX2: products of a few tokens with a matrix of which only the
kept entries are stored.

Only the process that compiles loops imports this file. Values are bf16, as their bits; sums are
fp32. A mask says for 64 columns at a time which entries of a row are kept; a shuffle of bytes
(`vpshufb`), whose control a table has, moves values to 8 columns at a time.
"""

from __future__ import annotations

from functools import reduce
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
    put_fp32,
    put_outputs,
    store_sums,
    variables,
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
    global_constant,
    intrinsic,
    outside,
    picks,
)

LANES = 8
"""Numbers of a vector."""
CHAINS = 2
"""Sums of a token that are made side by side, so that instructions wait less for each other."""
AHEAD = 512
"""Values from what is multiplied to what is fetched into the cache meanwhile."""


def _shuffles() -> ir.Constant:
    """For each byte of a mask, the control of a shuffle that moves bf16 values to the upper halves
    of the fp32 numbers of their columns, and zero to the other bytes."""
    table = np.full((256, 32), 0x80, np.uint8)
    for byte in range(256):
        kept = [column for column in range(8) if byte >> column & 1]
        for number, column in enumerate(kept):
            table[byte, 4 * column + 2 : 4 * column + 4] = 2 * number, 2 * number + 1
    return ir.Constant(ir.ArrayType(INT8, table.size), bytearray(table))


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


@compiled
def lay_out_rows(x: int, is_bf16: int, tokens: int, columns: int, wide: int, width: int) -> int:
    """Write tokens to rows of `width` numbers, filled up with zeros; returns the rows of a
    token."""
    lay_out(x, is_bf16, tokens, columns, wide, width, 1)
    for token in range(tokens):
        for column in range(columns, width):
            put_fp32(wide, token * width + column, np.float32(0))
    return 1


# -- kept entries by a mask -----------------------------------------------------------------------


def _expand(builder: Any, word: Any, number: Any, values: Any, table: Any) -> list[Any]:
    """The fp32 weights of a word's columns, 8 at a time, whose values begin at a number."""
    weights = []
    half, control = ir.VectorType(INT8, 16), ir.VectorType(INT8, 32)
    for group in range(WORD // LANES):
        shift = 8 * group - CONTROL_BITS
        moved = builder.lshr(word, INT64(shift)) if group else builder.shl(word, INT64(-shift))
        begin = builder.and_(moved, INT64(255 << CONTROL_BITS))
        some = load(builder, values, number, 2, half)
        twice = builder.shuffle_vector(some, some, picks([*range(16)] * 2))
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
    chains = CHAINS if tokens == 1 else 1

    # Reason: addresses of the tokens, of the rows' words and first value, and of the sums.
    def multiply(_: Any, x: Any, width: Any, bits: Any, words: Any, values: Any, out: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            x, width, bits, words, values, out = arguments
            table = global_constant(builder, "shuffles", SHUFFLES)
            controls = builder.bitcast(table, INT8.as_pointer())
            sums = [
                [variables(builder, chains, vector) for _ in range(ROWS)] for _ in range(tokens)
            ]
            [number] = variables(builder, 1, INT64)
            with for_range(builder, words) as loop:
                before, expanded = builder.load(number), []
                ahead = builder.add(before, INT64(AHEAD))
                fetch(builder, address_of(builder, values, ahead, 2, INT8))
                for row in range(ROWS):
                    entry = builder.add(builder.mul(loop.index, INT64(ROWS)), INT64(row))
                    word = load(builder, bits, entry, 8, INT64)
                    expanded.append(_expand(builder, word, before, values, controls))
                    before = builder.add(before, builder.ctpop(word))
                builder.store(before, number)
                begin = builder.mul(loop.index, INT64(WORD))
                for group in range(WORD // LANES):
                    column = builder.add(begin, INT64(LANES * group))
                    for token in range(tokens):
                        entry = builder.add(column, builder.mul(width, INT64(token)))
                        factor = load(builder, x, entry, 4, vector)
                        for row, weights in enumerate(expanded):
                            total = sums[token][row][group % chains]
                            now = builder.load(total)
                            added = _multiply_add(builder, weights[group], factor, now)
                            builder.store(added, total)
            store_sums(builder, chain.from_iterable(sums), out)
            return context.get_dummy_value()

        return types.void(x, width, bits, words, values, out), call

    return intrinsic(multiply)


multiply_masked = masked_product(4, lay_out_rows, _masked_rows(1), _masked_rows(4))


# -- kept entries by a list of columns ------------------------------------------------------------


def _listed_row(lanes: int) -> Any:
    """A function for the products of one row with `lanes` tokens.

    With one token each vector has the products of one entry in its first lane. To read four values
    and clear all but the upper half of each is one instruction, since they are read from two
    bytes before the entry; what the other lanes have is of no meaning.
    """
    vector = ir.VectorType(FLOAT, max(lanes, 4))
    words = ir.VectorType(INT32, 4)
    upper = ir.Constant(words, [0xFFFF0000] * 4)

    # Reason: addresses of the tokens, of all values and steps, the bounds of the row's, and the
    # address of its results.
    def multiply(_: Any, x: Any, values: Any, steps: Any, at: Any, end: Any, out: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            x, values, steps, at, end, out = arguments
            sums = variables(builder, GROUP, vector)
            last = alloca_once(builder, INT64)
            builder.store(INT64(-1), last)
            groups = builder.udiv(builder.sub(end, at), INT64(GROUP))
            with for_range(builder, groups) as loop:
                begin = builder.add(at, builder.mul(loop.index, INT64(GROUP)))
                column = builder.load(last)
                for number, total in enumerate(sums):
                    entry = builder.add(begin, INT64(number))
                    step = load(builder, steps, entry, 1, INT8)
                    column = builder.add(column, builder.zext(step, INT64))
                    before = builder.sub(entry, INT64(1))
                    bits = load(builder, values, before, 2, words)
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


@compiled
def multiply_listed(numbers: Numbers) -> None:
    """`matrix` has the five int64 of `multiply_masked`, where places are the distances of each
    entry's column from the last one's, one byte each; each row has a multiple of four entries."""
    x, bias, out, is_bf16, tokens, matrix, scratch, begin, end = numbers
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
            here = out + size * rows * done
            put_outputs(sums, 0, 1, 1, count, bias, row, here, is_bf16, rows)
        done += count
