"""The loops of `sparse_products.py`, which only the process that compiles them imports.

AVX-512 multiplies 32 pairs of bf16 at once and adds the exact products, two and two, to 16 sums in
fp32 (`vdpbf16ps`). So that the numbers of one column lie side by side, matrices are transposed
first, in blocks of 16 × 16 that are exchanged between registers.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types

from axsparse.samo.host.compiled_loops import DEPTH, LENGTHS, LINES, Array
from axsparse.samo.host.compiled_loops import TILE as TOKENS
from axsparse.samo.host.loop_parts import (
    BFLOAT,
    FLOAT,
    INT16,
    INT32,
    INT64,
    add_bf16_products,
    alike,
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

BLOCK = 16
"""Rows and columns that are transposed at once."""
PAIRS = 32
"""Products of one instruction, and numbers of a vector."""
SUMS = 16
"""Sums of one instruction."""
CHAINS = 2
"""Sums of one entry that are made side by side, so that instructions wait less for each other."""
AT_ONCE = 4
"""Weights that are multiplied in one round of the innermost loop, two by one instruction."""
QUARTER = 8
"""A quarter of a vector: the shuffle that joins two vectors works within each such part."""
MAGNITUDE = 0x7FFF
"""The bits of a number in bf16, less its sign."""

_NUMBERS, _WORDS = ir.VectorType(INT16, PAIRS), ir.VectorType(INT32, SUMS)
_FACTORS, _SUMS = ir.VectorType(BFLOAT, PAIRS), ir.VectorType(FLOAT, SUMS)
_HALVES = [
    [
        side + begin + half + number
        for begin in range(0, PAIRS, QUARTER)
        for number in range(QUARTER // 2)
        for side in (0, PAIRS)
    ]
    for half in (0, QUARTER // 2)
]
"""For each half of the sums, the order in which the numbers of two inputs alternate, token by
token, so that one instruction adds both products of a token. A processor shuffles within quarters
of a vector, so that half of each quarter goes to each."""
_ORDER = [
    half * SUMS + begin // 2 + number
    for begin in range(0, PAIRS, QUARTER)
    for half in (0, 1)
    for number in range(QUARTER // 2)
]
"""Puts the sums of both halves back into the order of the tokens."""


def _numbers(value: int) -> ir.Constant:
    return ir.Constant(_NUMBERS, [value] * PAIRS)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * SUMS)


# -- transposing --------------------------------------------------------------------------------


# Reason: two arrays, where to begin in each, and how far rows are apart in each.
@intrinsic
def turn(_: Any, source: Any, at: Any, apart: Any, target: Any, to: Any, target_apart: Any) -> Any:
    """Transpose one block: rows at `at`, `at + apart`, … become columns of the rows at `to`, …"""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, apart, target, to, target_apart = arguments
        vector = ir.VectorType(INT16, BLOCK)

        def row_of(kind: Any, array: Any, first: Any, stride: Any, row: int) -> Any:
            begin = builder.add(first, builder.mul(stride, INT64(row)))
            return vector_pointer(context, builder, kind, array, begin, vector)

        rows = [
            builder.load(row_of(signature.args[0], source, at, apart, row), align=2)
            for row in range(BLOCK)
        ]
        # The next block of the same columns is on its way meanwhile.
        for row in range(BLOCK, 2 * BLOCK):
            fetch(builder, row_of(signature.args[0], source, at, apart, row))
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


@compiled
def transpose(source: Array, target: Array, begin: int, end: int, first: int, length: int) -> None:
    """Write rows [begin, end) of a matrix, `(rows, columns)`, from column `first` on, to the
    columns of `target`, `(columns, …)`, whose further columns become zero up to `length`."""
    columns, target_apart = target.shape
    apart = source.shape[1]
    whole_rows = (end - begin) // BLOCK * BLOCK
    whole_columns = columns // BLOCK * BLOCK
    for row in range(0, whole_rows, BLOCK):
        for column in range(0, whole_columns, BLOCK):
            at = (begin + row) * apart + first + column
            turn(source, at, apart, target, column * target_apart + row, target_apart)
    for column in range(columns):
        for row in range(0 if column >= whole_columns else whole_rows, length):
            target[column, row] = source[begin + row, first + column] if begin + row < end else 0


# -- the kept entries of a product ----------------------------------------------------------------


def _dot_of(instructions: int) -> Any:
    """A generator of the sum of PAIRS · `instructions` products of two vectors, as fp32."""

    def dot(_: Any, one: Any, at_one: Any, other: Any, at_other: Any) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            totals = [ir.Constant(_SUMS, [0.0] * SUMS)] * CHAINS
            for number in range(instructions):
                read = []
                for side in (0, 2):
                    at = builder.add(arguments[side + 1], INT64(number * PAIRS))
                    where = vector_pointer(
                        context, builder, signature.args[side], arguments[side], at, _FACTORS
                    )
                    read.append(builder.load(where, align=2))
                chain = number % CHAINS
                totals[chain] = add_bf16_products(builder, totals[chain], *read)
            return lane_sum(builder, builder.fadd(*totals))

        return types.float32(one, at_one, other, at_other), call

    return intrinsic(dot)


_dot_of_64, _dot_of_128, _dot_of_256 = (_dot_of(length // PAIRS) for length in LENGTHS)


@compiled
def sample(
    panels: tuple[Array, Array],
    length: int,
    first: int,
    where: tuple[Array, Array, Array],
    sums: Array,
    adds: int,
) -> None:
    """The kept entries of a product, as far as the columns of the inner panel go.

    Both `panels`, the outer `(rows, …)` and the inner `(columns, …)`, are transposed, and `length`
    long; the inner one begins with column `first`. `where` has the columns of all kept entries, row
    by row, the number of each row's next entry, which is moved on, and the number of its end. An
    entry goes to `sums`, or is added to the sums there if `adds`.
    """
    outer, inner = panels
    columns, cursors, ends = where
    apart = outer.shape[1]
    limit = first + inner.shape[0]
    for row in range(outer.shape[0]):
        at, number, end = row * apart, cursors[row], ends[row]
        while number < end and columns[number] < limit:
            vector_pointer = (columns[number] - first) * apart
            if length == 256:
                value = _dot_of_256(inner, vector_pointer, outer, at)
            elif length == 128:
                value = _dot_of_128(inner, vector_pointer, outer, at)
            else:
                value = _dot_of_64(inner, vector_pointer, outer, at)
            sums[number] = sums[number] + value if adds else value
            number += 1
        cursors[row] = number


@compiled
def sampled_product(
    factors: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    room: tuple[Array, Array],
    sums: Array,
) -> None:
    """The entries of `outerᵀ inner` that an index keeps.

    `factors` are the outer `(tokens, rows)` and the inner `(tokens, columns)`. `where` has the
    columns of all kept entries, row by row, a scratch number a row, and the number of each row's
    end. `room` is scratch memory for the tokens of both factors that are laid out at a time,
    `(rows, length)` and `(columns, length)`. `sums`, `(kept,)` in fp32, receives the entries.
    """
    outer, inner = factors
    _, cursors, ends = where
    outer_panel, inner_room = room
    tokens, rows = outer.shape
    width = inner.shape[1]
    for begin in range(0, tokens, outer_panel.shape[1]):
        end = min(begin + outer_panel.shape[1], tokens)
        length = 64 if end - begin <= 64 else 128 if end - begin <= 128 else 256
        transpose(outer, outer_panel, begin, end, 0, length)
        for row in range(rows):
            cursors[row] = ends[row - 1] if row else 0
        for first in range(0, width, inner_room.shape[0]):
            inner_panel = inner_room[: min(inner_room.shape[0], width - first)]
            transpose(inner, inner_panel, begin, end, first, length)
            sample((outer_panel, inner_panel), length, first, where, sums, int(begin > 0))


# -- products with the kept entries of a weight ---------------------------------------------------


# Reason: a line and two lists, with where to begin in each, and the first input's number.
@intrinsic
def _list_vector(
    _: Any, line: Any, at: Any, input_number: Any, inputs: Any, weights: Any, listed: Any
) -> Any:
    """Add the weights other than zero among PAIRS, from `line[at]` on, to the end of a list.

    The first of them belongs to input `input_number`. Returns how many are listed then. Of the
    lists, PAIRS entries after the last one may get any numbers.
    """

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line, at, input_number, inputs, weights, listed = arguments
        kinds = signature.args
        read = builder.load(vector_pointer(context, builder, kinds[0], line, at, _NUMBERS), align=2)
        is_kept = builder.icmp_unsigned("!=", builder.and_(read, _numbers(MAGNITUDE)), _numbers(0))
        first = alike(builder, builder.trunc(input_number, INT16), PAIRS)
        names = builder.add(first, ir.Constant(_NUMBERS, list(range(PAIRS))))
        for numbers, kind, array in ((names, kinds[3], inputs), (read, kinds[4], weights)):
            name = "llvm.x86.avx512.mask.compress.v32i16"
            chosen = outside(builder, name, _NUMBERS, [numbers, _numbers(0), is_kept])
            builder.store(
                chosen, vector_pointer(context, builder, kind, array, listed, _NUMBERS), align=2
            )
        more = outside(builder, "llvm.ctpop.i32", INT32, [builder.bitcast(is_kept, INT32)])
        return builder.add(listed, builder.zext(more, INT64))

    return types.int64(line, at, input_number, inputs, weights, listed), call


# Reason: the factors, two lists and the sums; their vectors are made by the same few lines.
@intrinsic
def _add_pairs(
    _: Any, panel: Any, inputs: Any, weights: Any, rounds: Any, sums: Any, to: Any
) -> Any:
    """Add weights times inputs to the sums of TOKENS tokens, AT_ONCE weights in each round.

    `panel` has TOKENS numbers of each input side by side; `inputs` and `weights` are lists, and the
    sums begin at `sums[to]`.
    """

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = dict(zip(names, zip(signature.args, arguments, strict=True), strict=True))

        def at(name: str, number: Any, kind: Any) -> Any:
            return vector_pointer(context, builder, *arrays[name], number, kind)

        totals = {
            (chain, vector, half): alloca_once(builder, _SUMS)
            for chain in range(AT_ONCE // 2)
            for vector in range(TOKENS // PAIRS)
            for half in (0, 1)
        }
        places = {
            (vector, half): at(
                "sums", builder.add(arguments[-1], INT64(vector * PAIRS + half * SUMS)), _SUMS
            )
            for chain, vector, half in totals
            if chain == 0
        }
        for (chain, vector, half), total in totals.items():
            nothing = ir.Constant(_SUMS, [0.0] * SUMS)
            first = nothing if chain else builder.load(places[vector, half], align=4)
            builder.store(first, total)
        with for_range(builder, arguments[3], intp=INT64) as loop:
            begin = builder.mul(loop.index, INT64(AT_ONCE))
            for chain in range(AT_ONCE // 2):
                pair = builder.add(begin, INT64(2 * chain))
                two_inputs = builder.load(at("inputs", pair, INT32), align=2)
                two_weights = builder.load(at("weights", pair, INT32), align=2)
                factors = builder.bitcast(alike(builder, two_weights, SUMS), _FACTORS)
                one = builder.and_(two_inputs, INT32(0xFFFF))
                other = builder.lshr(two_inputs, INT32(16))
                for vector in range(TOKENS // PAIRS):
                    read = []
                    for row in (one, other):
                        source = builder.mul(builder.zext(row, INT64), INT64(TOKENS))
                        source = builder.add(source, INT64(vector * PAIRS))
                        read.append(builder.load(at("panel", source, _NUMBERS), align=2))
                    for half in (0, 1):
                        mixed = builder.shuffle_vector(*read, picks(_HALVES[half]))
                        total = totals[chain, vector, half]
                        products = builder.bitcast(mixed, _FACTORS)
                        added = add_bf16_products(builder, builder.load(total), products, factors)
                        builder.store(added, total)
        for (vector, half), where in places.items():
            found = [builder.load(totals[chain, vector, half]) for chain in range(AT_ONCE // 2)]
            builder.store(reduce(builder.fadd, found), where, align=4)
        return context.get_dummy_value()

    names = ("panel", "inputs", "weights", "rounds", "sums", "to")
    return types.void(panel, inputs, weights, rounds, sums, to), call


@intrinsic
def _round_vector(_: Any, sums: Any, at: Any, target: Any, to: Any) -> Any:
    """Round the sums of PAIRS tokens to the nearest numbers of bf16, ties to even, as torch does,
    and write them in the order of the tokens."""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, at, target, to = arguments
        half_way = []
        for half in (0, 1):
            begin = builder.add(at, INT64(half * SUMS))
            address = vector_pointer(context, builder, signature.args[0], sums, begin, _SUMS)
            bits = builder.bitcast(builder.load(address, align=4), _WORDS)
            odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
            # The lower half of a NaN is zero here, so that it stays one.
            rounded = builder.add(builder.add(bits, odd), _words(0x7FFF))
            upper = builder.lshr(rounded, _words(16))
            half_way.append(builder.trunc(upper, ir.VectorType(INT16, SUMS)))
        address = vector_pointer(context, builder, signature.args[2], target, to, _NUMBERS)
        builder.store(builder.shuffle_vector(*half_way, picks(_ORDER)), address, align=2)
        return context.get_dummy_value()

    return types.void(sums, at, target, to), call


@compiled
def _list_line(
    lines: Array, line: int, first: int, count: int, inputs: Array, weights: Array
) -> int:
    """List the weights other than zero among `count` ones of a line, with the numbers of their
    inputs; returns in how many rounds they are multiplied. What the last round lacks is filled up
    with zeros."""
    listed = 0
    at = line * lines.shape[1] + first
    whole = count // PAIRS * PAIRS
    for number in range(0, whole, PAIRS):
        listed = _list_vector(lines, at + number, number, inputs, weights, listed)
    for number in range(whole, count):
        if lines[line, first + number] & MAGNITUDE:
            inputs[listed], weights[listed] = number, lines[line, first + number]
            listed += 1
    rounds = (listed + AT_ONCE - 1) // AT_ONCE
    for number in range(listed, rounds * AT_ONCE):
        inputs[number], weights[number] = 0, 0
    return rounds


@compiled
def add_products(
    panels: tuple[Array, int],
    lines: tuple[Array, int, int],
    lists: tuple[Array, Array, Array],
    sums: Array,
    extent: tuple[int, int, int],
) -> None:
    """Add to sums the products of inputs with lines of the weight.

    `extent` is the number of tiles, of inputs and of lines. `panels` is a matrix `(…, TOKENS)` that
    has a row for each input of each tile, and the first row. `lines` is a matrix, and the row and
    the column of it where the first line begins. `lists` is scratch memory for inputs and weights
    of each line, and for the rounds in which they are multiplied. `sums`, `(…, TOKENS)`, has a row
    for each line of each tile.
    """
    inputs_of_tiles, at = panels
    numbers, first_line, first = lines
    inputs, weights, rounds = lists
    tiles, depth, count = extent
    for line in range(count):
        rounds[line] = _list_line(
            numbers, first_line + line, first, depth, inputs[line], weights[line]
        )
    for tile in range(tiles):
        panel = inputs_of_tiles[at + tile * depth : at + (tile + 1) * depth]
        for line in range(count):
            to = (tile * count + line) * TOKENS
            _add_pairs(panel, inputs[line], weights[line], rounds[line], sums, to)


@compiled
def put(
    sums: Array, extent: tuple[int, int], rounded: Array, outputs: tuple[Array, int], first: int
) -> None:
    """Round sums and write them into the matrix of outputs.

    `extent` is the number of tiles and of lines, and `sums`, `(tiles · lines, TOKENS)`, has a row
    for each line of each tile. Tokens become rows from `outputs[1]` on, lines columns from `first`
    on.
    """
    tiles, count = extent
    matrix, begin = outputs
    apart = matrix.shape[1]
    whole_lines = count // BLOCK * BLOCK
    for tile in range(tiles):
        for at in range(0, count * TOKENS, PAIRS):
            _round_vector(sums, tile * count * TOKENS + at, rounded, at)
        row = begin + tile * TOKENS
        tokens = min(TOKENS, matrix.shape[0] - row)
        whole_tokens = tokens // BLOCK * BLOCK
        for token in range(0, whole_tokens, BLOCK):
            for line in range(0, whole_lines, BLOCK):
                to = (row + token) * apart + first + line
                turn(rounded, line * TOKENS + token, TOKENS, matrix, to, apart)
        for token in range(tokens):
            for line in range(whole_lines if token < whole_tokens else 0, count):
                matrix[row + token, first + line] = rounded[line, token]


@compiled
def multiply(
    rows: Array,
    weight: tuple[Array, int],
    bias: Array,
    outputs: tuple[Array, int],
    room: tuple[Array, Array, Array, Array, tuple[Array, Array, Array]],
) -> None:
    """Products of rows `(tokens, inputs)` with a weight's lines, and the bias, as rows of outputs.

    `weight` is the matrix, and whether its lines are its columns. `bias`, `(outputs,)` in fp32,
    also says how many outputs there are. `outputs` is the matrix of all outputs, and the row of the
    first one. `room` is scratch memory for the inputs of each tile, `(…, TOKENS)`, for the sums of
    each tile, `(…, TOKENS)`, for lines of a weight that is transposed, `(LINES, DEPTH)`, for
    rounded sums, `(LINES, TOKENS)`, and for the lists of `add_products`.
    """
    matrix, is_transposed = weight
    panels, sums, turned, rounded, lists = room
    tokens, width = rows.shape
    tiles = (tokens + TOKENS - 1) // TOKENS
    for at in range(0, width, DEPTH):
        depth = min(DEPTH, width - at)
        for tile in range(tiles):
            begin, end = tile * TOKENS, min((tile + 1) * TOKENS, tokens)
            to = tiles * at + tile * depth
            transpose(rows, panels[to : to + depth], begin, end, at, TOKENS)
    for first in range(0, bias.size, LINES):
        count = min(LINES, bias.size - first)
        for row in range(tiles * count):
            for token in range(TOKENS):
                sums[row, token] = bias[first + row % count]
        for at in range(0, width, DEPTH):
            depth = min(DEPTH, width - at)
            lines = matrix, first, at
            if is_transposed:
                transpose(matrix, turned[:count], at, at + depth, first, depth)
                lines = turned, 0, 0
            add_products((panels, tiles * at), lines, lists, sums, (tiles, depth, count))
        put(sums, (tiles, count), rounded, outputs, first)
