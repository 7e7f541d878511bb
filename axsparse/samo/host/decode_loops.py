"""The loops of `kept_matrix.py`: products of a few tokens with a matrix of which only the kept
entries are stored.

Only the process that compiles loops imports this file. Arrays are given by their addresses, since
for the smallest layers describing an array takes longer than the product. Values are bf16, as their
bits; sums are fp32. A mask says for 64 columns at a time which entries of a row are kept; AVX-512
moves a vector of values to the columns of its kept entries by one instruction (`vpexpandw`), AVX2
by a shuffle of bytes (`vpshufb`) for 8 columns, whose control it reads from a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import codegen

from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.host.loop_parts import (
    BIT,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    alike,
    alloca_once,
    compiled,
    for_range,
    intrinsic,
    lane_sum,
    outside,
    picks,
    vector_pointer,
)

WORD = 64
"""Columns of a word of a mask."""
CHAINS = 2
"""Sums of a token that are made side by side, so that instructions wait less for each other."""
GROUP = 4
"""Entries of a list that are multiplied in one round, each added to another sum."""
LANES = 8
"""Tokens that are multiplied at once with a list."""
_codegen: Any = codegen  # neither is typed
_config: Any = config


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


@intrinsic
def int32_at(_: Any, address: Any, entry: Any) -> Any:
    """An entry of an array of int32."""

    def call(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        number = builder.load(_address_of(builder, arguments[0], arguments[1], 4, INT32), align=4)
        return builder.sext(number, INT64)

    return types.int64(address, entry), call


def _address_of(builder: Any, address: Any, entry: Any, nbytes: int, kind: Any) -> Any:
    """Where a vector or a number begins: at an entry, of `nbytes` each, of an array."""
    begin = builder.add(address, builder.mul(entry, INT64(nbytes)))
    return builder.inttoptr(begin, kind.as_pointer())


def _fp32(builder: Any, bits: Any) -> Any:
    """bf16 numbers, by their bits, as fp32."""
    lanes = getattr(bits.type, "count", None)
    if lanes is None:
        return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)
    wide = builder.zext(bits, ir.VectorType(INT32, lanes))
    upper = builder.shl(wide, ir.Constant(wide.type, [16] * lanes))
    return builder.bitcast(upper, ir.VectorType(FLOAT, lanes))


def _multiply_add(builder: Any, one: Any, other: Any, total: Any) -> Any:
    lanes = getattr(total.type, "count", None)
    name = "llvm.fmuladd.f32" if lanes is None else f"llvm.fmuladd.v{lanes}f32"
    return outside(builder, name, total.type, [one, other, total])


# -- kept entries by a mask -----------------------------------------------------------------------

Read = Callable[[Any, Any], Any]
"""`read(number, kind)` loads the values that follow a number of the word's kept entries."""


def _by_avx512(builder: Any, word: Any, read: Read, _: Any) -> tuple[list[Any], Any]:
    """The fp32 weights of a word's columns, 16 at a time, and the number of kept entries."""
    weights, number = [], INT64(0)
    vector = ir.VectorType(INT16, 32)
    for group in range(2):
        bits = builder.trunc(builder.lshr(word, INT64(32 * group)), INT32)
        kept = builder.bitcast(bits, ir.VectorType(BIT, 32))
        nothing = ir.Constant(vector, [0] * 32)
        name = "llvm.x86.avx512.mask.expand.v32i16"
        spread = outside(builder, name, vector, [read(number, vector), nothing, kept])
        for half in range(2):
            part = builder.shuffle_vector(spread, spread, picks(range(16 * half, 16 * half + 16)))
            weights.append(_fp32(builder, part))
        number = builder.add(number, builder.zext(builder.ctpop(bits), INT64))
    return weights, number


def _by_avx2(builder: Any, word: Any, read: Read, table: Any) -> tuple[list[Any], Any]:
    """The fp32 weights of a word's columns, 8 at a time, and the number of kept entries."""
    weights, number = [], INT64(0)
    half, control = ir.VectorType(INT8, 16), ir.VectorType(INT8, 32)
    for group in range(8):
        shift = 8 * group - CONTROL_BITS
        moved = builder.lshr(word, INT64(shift)) if group else builder.shl(word, INT64(-shift))
        begin = builder.and_(moved, INT64(255 << CONTROL_BITS))
        values = read(number, half)
        twice = builder.shuffle_vector(values, values, picks([*range(16)] * 2))
        where = builder.bitcast(builder.gep(table, [begin]), control.as_pointer())
        arguments = [twice, builder.load(where, align=1)]
        spread = outside(builder, "llvm.x86.avx2.pshuf.b", control, arguments)
        weights.append(builder.bitcast(spread, ir.VectorType(FLOAT, 8)))
        number = builder.add(number, builder.ctpop(begin))
    return weights, number


def _by_entry(builder: Any, word: Any, read: Read, _: Any) -> tuple[list[Any], Any]:
    """The fp32 weights of a word's columns, one at a time, and the number of kept entries."""
    weights, number = [], INT64(0)
    for column in range(WORD):
        bit = builder.and_(builder.lshr(word, INT64(column)), INT64(1))
        weight = _fp32(builder, read(number, INT16))
        is_kept = builder.trunc(bit, BIT)
        weights.append(builder.select(is_kept, weight, ir.Constant(FLOAT, 0.0)))
        number = builder.add(number, bit)
    return weights, number


def _has(*needed: str) -> bool:
    known = _config.CPU_FEATURES
    listed = _codegen.get_host_cpu_features() if known is None else known
    return {f"+{each}" for each in needed} <= set(listed.split(","))


# Reason: one loop in instructions, which are emitted in their order.
def _masked_row(tokens: int) -> Any:
    """A function for the products of one row with `tokens` tokens."""
    spread: Callable[..., Any]
    spread, lanes = _by_entry, 1
    if _has("avx512vbmi2", "avx512bw"):
        spread, lanes = _by_avx512, 16
    elif _has("avx2", "fma"):
        spread, lanes = _by_avx2, 8
    vector = ir.VectorType(FLOAT, lanes) if lanes > 1 else FLOAT
    zero = ir.Constant(vector, [0.0] * lanes if lanes > 1 else 0.0)

    # Reason: addresses of the tokens, of the row's words, of all values, of the row's results, and
    # how far tokens and results are apart; numba demands that each is an argument.
    def multiply(
        _: Any,
        x: Any,
        bits: Any,
        words: Any,
        values: Any,
        at: Any,
        out: Any,
        apart: Any,
        tab: Any,
    ) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, bits, words, values, at, out, apart, table = arguments
            controls = vector_pointer(context, builder, signature.args[7], table, INT64(0), INT8)
            sums = [[alloca_once(builder, vector) for _ in range(CHAINS)] for _ in range(tokens)]
            for each in (each for chains in sums for each in chains):
                builder.store(zero, each)
            number = alloca_once(builder, INT64)
            builder.store(at, number)
            width = builder.mul(words, INT64(WORD))
            with for_range(builder, words) as loop:
                word = builder.load(_address_of(builder, bits, loop.index, 8, INT64))
                before = builder.load(number)

                def read(further: Any, kind: Any) -> Any:
                    entry = builder.add(before, further)
                    return builder.load(_address_of(builder, values, entry, 2, kind), align=2)

                weights, kept = spread(builder, word, read, controls)
                builder.store(builder.add(before, kept), number)
                begin = builder.mul(loop.index, INT64(WORD))
                for group, weight in enumerate(weights):
                    column = builder.add(begin, INT64(lanes * group))
                    for token, chains in enumerate(sums):
                        entry = builder.add(column, builder.mul(width, INT64(token)))
                        factor = builder.load(_address_of(builder, x, entry, 4, vector), align=4)
                        total = chains[group % CHAINS]
                        added = _multiply_add(builder, weight, factor, builder.load(total))
                        builder.store(added, total)
            for token, chains in enumerate(sums):
                result = builder.fadd(*map(builder.load, chains))
                if lanes > 1:
                    result = lane_sum(builder, result)
                entry = builder.mul(apart, INT64(token))
                builder.store(result, _address_of(builder, out, entry, 4, FLOAT))
            return context.get_dummy_value()

        return types.void(x, bits, words, values, at, out, apart, tab), call

    return intrinsic(multiply)


_masked_row_of_1, _masked_row_of_4 = _masked_row(1), _masked_row(4)


# Reason: five arrays by their addresses, three sizes, and the rows of a thread.
@compiled
def multiply_masked(
    x: int,
    values: int,
    mask: int,
    first: int,
    out: int,
    tokens: int,
    words: int,
    rows: int,
    begin: int,
    end: int,
) -> None:
    """Write `x Wᵀ` for rows [begin, end) of a matrix to `out`, `(tokens, rows)`, in fp32.

    `values` has the bf16 values of kept entries, row by row, `mask`, `(rows, words)`, their places
    and `first`, `(rows + 1,)` of int32, the number of each row's first value. `x`, `(tokens, 64 ·
    words)`, is fp32, with zeros beyond the columns. Behind the values, 32 more are read.
    """
    apart = 4 * WORD * words
    for row in range(begin, end):
        at, bits = int32_at(first, row), mask + 8 * words * row
        token = 0
        while token + 4 <= tokens:
            to = out + 4 * (token * rows + row)
            _masked_row_of_4(x + token * apart, bits, words, values, at, to, rows, SHUFFLES)
            token += 4
        while token < tokens:
            to = out + 4 * (token * rows + row)
            _masked_row_of_1(x + token * apart, bits, words, values, at, to, rows, SHUFFLES)
            token += 1


# -- kept entries by a list of columns ------------------------------------------------------------


def _listed_row(lanes: int) -> Any:
    """A function for the products of one row with `lanes` tokens."""
    vector = ir.VectorType(FLOAT, lanes) if lanes > 1 else FLOAT
    zero = ir.Constant(vector, [0.0] * lanes if lanes > 1 else 0.0)

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
                    step = builder.load(_address_of(builder, steps, entry, 1, INT8))
                    column = builder.add(column, builder.zext(step, INT64))
                    bits = builder.load(_address_of(builder, values, entry, 2, INT16), align=2)
                    weight = _fp32(builder, bits)
                    where = _address_of(builder, x, column, 4 * lanes, vector)
                    factor = builder.load(where, align=4)
                    if lanes > 1:
                        weight = alike(builder, weight, lanes)
                    added = _multiply_add(builder, weight, factor, builder.load(total))
                    builder.store(added, total)
                builder.store(column, last)
            parts = [builder.load(each) for each in sums]
            while len(parts) > 1:
                parts = [builder.fadd(*parts[:2]), *parts[2:]]
            builder.store(parts[0], builder.inttoptr(out, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(x, values, steps, at, end, out), call

    return intrinsic(multiply)


_listed_row_of_1, _listed_row_of_8 = _listed_row(1), _listed_row(LANES)


# Reason: five arrays by their addresses, the tokens, and the rows of a thread.
@compiled
def multiply_listed(
    x: int, values: int, steps: int, first: int, out: int, lanes: int, begin: int, end: int
) -> None:
    """Write `x Wᵀ` for rows [begin, end) of a matrix to `out`, `(rows, lanes)`, in fp32.

    `values` has the bf16 values of kept entries, row by row, `steps` the distance of each one's
    column from the last one's, and `first`, `(rows + 1,)` of int32, the number of each row's first
    value; each row has a multiple of four. `x`, `(columns, lanes)`, is fp32, and lanes are 1 or 8.
    """
    for row in range(begin, end):
        at, past = int32_at(first, row), int32_at(first, row + 1)
        if lanes == 1:
            _listed_row_of_1(x, values, steps, at, past, out + 4 * row)
        else:
            _listed_row_of_8(x, values, steps, at, past, out + 4 * LANES * row)
