"""The common parts of the loops of `decode_loops.py` and `bf16_decode_loops.py`. Only the process
that compiles loops imports this file.

Arrays are given by their addresses, since for the smallest layers describing an array takes longer
than the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types

from axsparse.samo.host.kept_encodings import ROWS, SUMS, WORD
from axsparse.samo.host.loop_parts import (
    FLOAT,
    INT16,
    INT32,
    INT64,
    alloca_once,
    compiled,
    intrinsic,
    lane_sum,
)

Numbers: TypeAlias = tuple[int, ...]
"""The arguments of a loop, which writes `x Wᵀ + bias` for some rows of a matrix W: addresses of
`x`, `(tokens, columns)`, of `bias`, `(rows,)`, or 0, and of `out`, `(tokens, rows)`; whether these
are bf16, or fp32; the number of tokens; addresses of W's encoding (`matrix`) and of memory for
`SUMS` fp32 numbers and the tokens (`scratch`); and the bounds of the rows."""


def address_of(builder: Any, address: Any, entry: Any, nbytes: int, kind: Any) -> Any:
    """Where a vector or a number begins: at an entry, of `nbytes` each, of an array."""
    begin = builder.add(address, builder.mul(entry, INT64(nbytes)))
    return builder.inttoptr(begin, kind.as_pointer())


def load(builder: Any, address: Any, entry: Any, nbytes: int, kind: Any) -> Any:
    return builder.load(address_of(builder, address, entry, nbytes, kind), align=nbytes)


def variables(builder: Any, number: int, kind: Any) -> list[Any]:
    """Variables, which are zero."""
    made = [alloca_once(builder, kind) for _ in range(number)]
    for each in made:
        builder.store(ir.Constant(kind, None), each)
    return made


def store_sums(builder: Any, sums: Iterable[Sequence[Any]], out: Any) -> None:
    """Write the sum of each group of variables, which are vectors, to an array of fp32."""
    for entry, group in enumerate(sums):
        total = lane_sum(builder, reduce(builder.fadd, map(builder.load, group)))
        builder.store(total, address_of(builder, out, INT64(entry), 4, FLOAT))


def _fp32(builder: Any, bits: Any) -> Any:
    """A bf16 number, by its bits, as fp32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)


def _reader(kind: Any, nbytes: int, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """A function for loops that reads an entry of an array at an address."""

    def read(_: Any, address: Any, entry: Any) -> Any:
        def call(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            where = address_of(builder, arguments[0], arguments[1], nbytes, kind)
            return convert(builder, builder.load(where, align=nbytes))

        return result(address, entry), call

    return intrinsic(read)


int32_at = _reader(INT32, 4, types.int64, lambda builder, number: builder.sext(number, INT64))
int64_at = _reader(INT64, 8, types.int64, lambda _, number: number)
fp32_at = _reader(FLOAT, 4, types.float32, lambda _, number: number)
bf16_at = _reader(INT16, 2, types.float32, _fp32)


def _rounded(builder: Any, number: Any) -> Any:
    """A number as the bits of the nearest one of bf16, the even one of two."""
    bits = builder.bitcast(number, INT32)
    odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
    return _upper(builder, number, builder.add(bits, builder.add(odd, INT32(0x7FFF))))


def _truncated(builder: Any, number: Any) -> Any:
    """A number as the bits of the next one of bf16 towards zero."""
    return _upper(builder, number, builder.bitcast(number, INT32))


def _upper(builder: Any, number: Any, bits: Any) -> Any:
    """The upper half of some bits, or a NaN of bf16 where the number is a NaN."""
    own = builder.or_(builder.bitcast(number, INT32), INT32(0x400000))
    is_nan = builder.fcmp_unordered("uno", number, number)
    upper = builder.lshr(builder.select(is_nan, own, bits), INT32(16))
    return builder.trunc(upper, INT16)


def _writer(kind: Any, nbytes: int, convert: Callable[[Any, Any], Any]) -> Any:
    """A function for loops that writes a number as an entry of an array at an address."""

    def write(_: Any, address: Any, entry: Any, number: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            where = address_of(builder, arguments[0], arguments[1], nbytes, kind)
            builder.store(convert(builder, arguments[2]), where, align=nbytes)
            return context.get_dummy_value()

        return types.void(address, entry, number), call

    return intrinsic(write)


put_fp32 = _writer(FLOAT, 4, lambda _, number: number)
put_bf16 = _writer(INT16, 2, _rounded)
put_upper = _writer(INT16, 2, _truncated)


# Reason: sums, where they are, and all that an output depends on.
@compiled
def put_outputs(
    sums: int,
    lane: int,
    lanes: int,
    parts: int,
    tokens: int,
    bias: int,
    row: int,
    out: int,
    is_bf16: int,
    rows: int,
) -> None:
    """Write the outputs of one row: the sums of its tokens' parts, which are `lanes` apart, and the
    row's bias; `bias` is 0 or the biases' address."""
    for token in range(tokens):
        total = fp32_at(sums, token * parts * lanes + lane)
        for part in range(1, parts):
            total += fp32_at(sums, (token * parts + part) * lanes + lane)
        if is_bf16:
            if bias:
                total += bf16_at(bias, row)
            put_bf16(out, token * rows + row, total)
        else:
            if bias:
                total += fp32_at(bias, row)
            put_fp32(out, token * rows + row, total)


def masked_product(nbytes: int, lay_out: Any, of_one: Any, of_four: Any) -> Any:
    """The loop for a matrix whose places are words of a mask.

    `lay_out(x, is_bf16, tokens, columns, inputs, width)` writes tokens to rows of `width` numbers
    of `nbytes` each, filled up with zeros, and returns the rows of a token. `of_one` and `of_four`
    multiply `ROWS` rows of the matrix with as many of these rows.
    """

    @compiled
    def multiply_masked(numbers: Numbers) -> None:
        """`matrix` has five int64: addresses of the bf16 values of kept entries, of their places
        and of the number of the first value of each two rows, int32; then rows and columns. Places
        are words of 64 columns: one word of each of two rows, then the next ones; values are in the
        same order. `begin` is even. Before and behind the values, 32 more may be read.
        """
        x, bias, out, is_bf16, tokens, matrix, scratch, begin, end = numbers
        values, mask, first = int64_at(matrix, 0), int64_at(matrix, 1), int64_at(matrix, 2)
        rows, columns = int64_at(matrix, 3), int64_at(matrix, 4)
        words = (columns + WORD - 1) // WORD
        inputs, width = scratch + 4 * SUMS, WORD * words
        parts = lay_out(x, is_bf16, tokens, columns, inputs, width)
        for row in range(begin, end, ROWS):
            at, bits = values + 2 * int32_at(first, row // ROWS), mask + 8 * words * row
            token = 0
            while token < tokens * parts:
                here, sums = inputs + nbytes * width * token, scratch + 4 * ROWS * token
                if token + 4 <= tokens * parts:
                    of_four(here, width, bits, words, at, sums)
                    token += 4
                else:
                    of_one(here, width, bits, words, at, sums)
                    token += 1
            for each in range(row, min(row + ROWS, end)):
                lane = each - row
                put_outputs(scratch, lane, ROWS, parts, tokens, bias, each, out, is_bf16, rows)

    return multiply_masked
