"""Loops over kept positions, which only the process that compiles them imports.

A word of 64 bits says which of 64 entries are kept. AVX-512 has instructions that move the kept
entries of a vector side by side, and back (`vpcompress`, `vpexpand`); a vector has 32 entries of 2
bytes or 16 of 4. Vectors are read and written in full, so that all of their entries have to exist.
(The same instructions can read or write the kept entries only, but AMD's processors then take many
times as long.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from axsparse.samo.host.compiled_loops import Array, cpu_features
from axsparse.samo.host.loop_parts import (
    BIT,
    INT64,
    compiled,
    compiles_to,
    fetch,
    intrinsic,
    outside,
    vector_pointer,
)
from axsparse.samo.host.step_loops import to_bf16
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD

ONE = np.uint64(1)
AHEAD = 2048
"""Entries by which the memory that is read next is fetched early. After a backward, whose gradients
are not in the cache, a gather takes a third less time with it; that far ahead, in bf16, is another
page, whose address takes longest to find."""
VECTOR_BYTES = 64
FEATURES = {2: "avx512vbmi2", 4: "avx512f"}
"""The instruction set that moves entries, by the bytes of an entry."""
MOVES_WORDS = cpu_features() >= {*FEATURES.values()}


def _word_mover(into_dense: bool, *, clears: bool = False) -> Any:
    """A function for loops that copies the entries of `dense`, from `at` on, whose bits are set in
    a word, lowest first, to `values` from `number` on, or these entries of `values` to `dense`; if
    it `clears`, the other entries of the word are set to 0.

    It returns how many there are; −1, having done nothing, where the processor has no instructions
    for it. Of `values`, 64 entries must exist, and those behind the copied ones may get any
    numbers.
    """

    # Reason: the arguments of the function that it stands for.
    def move(_: Any, dense: Any, at: Any, bits: Any, values: Any, number: Any) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            dense, position, word, values, first = arguments
            kinds, width = signature.args, signature.args[0].dtype.bitwidth
            lanes = VECTOR_BYTES * 8 // width
            vector = ir.VectorType(ir.IntType(width), lanes)
            number = first
            for group in range(64 // lanes):
                bits = builder.lshr(word, INT64(group * lanes))
                bits = builder.trunc(bits, ir.IntType(lanes))
                kept = builder.bitcast(bits, ir.VectorType(BIT, lanes))
                count = builder.zext(builder.ctpop(bits), INT64)
                begin = builder.add(position, INT64(group * lanes))
                ahead = builder.add(begin, INT64(AHEAD))
                fetch(builder, vector_pointer(context, builder, kinds[0], dense, ahead, vector))
                in_dense = vector_pointer(context, builder, kinds[0], dense, begin, vector)
                in_values = vector_pointer(context, builder, kinds[3], values, number, vector)
                source, target = (in_values, in_dense) if into_dense else (in_dense, in_values)
                # The entries of the target that are not kept stay as they are in dense form.
                stays = builder.load(in_dense, align=1)
                if clears:
                    stays = ir.Constant(vector, [0] * lanes)
                moved = builder.load(source, align=1) if into_dense else stays
                name = "expand" if into_dense else "compress"
                full_name = f"llvm.x86.avx512.mask.{name}.v{lanes}i{width}"
                made = outside(builder, full_name, vector, [moved, stays, kept])
                builder.store(made, target, align=1)
                number = builder.add(number, count)
            return builder.sub(number, first)

        needed = FEATURES.get(dense.dtype.bitwidth // 8)
        are_flat = dense.layout == values.layout == "C" and dense.dtype == values.dtype
        moves = are_flat and needed in cpu_features()
        signature = types.int64(dense, types.int64, types.uint64, values, types.int64)
        return signature, call if moves else lambda *_: INT64(-1)

    return intrinsic(move)


take_word, put_word = _word_mover(into_dense=False), _word_mover(into_dense=True)
lay_word = _word_mover(into_dense=True, clears=True)


@intrinsic
def lowest_bit(_: Any, bits: Any) -> Any:
    """The place of the lowest bit of a word that is not 0."""
    found = types.int64(types.uint64)
    return found, lambda _, builder, __, arguments: builder.cttz(arguments[0], BIT(1))


@compiled
def move_bits(
    words: Array, word: int, before: int, dense: Array, values: Array, into_dense: int
) -> None:
    """Copy all of `values` to or from the kept entries, beginning `before` set bits after the start
    of `word`.

    Words move as one where the processor has instructions for it. Elsewhere, and at both ends, bits
    move one by one.
    """
    number = -before
    while number < values.size:
        bits = words[word]
        base = word * MASK_WORD
        word += 1
        if number >= 0 and number + MASK_WORD <= values.size:
            if into_dense:
                moved = put_word(dense, base, bits, values, number)
            else:
                moved = take_word(dense, base, bits, values, number)
            if moved >= 0:
                number += moved
                continue
        while bits != 0 and number < values.size:
            if number >= 0:
                position = base + lowest_bit(bits)
                if into_dense:
                    dense[position] = values[number]
                else:
                    values[number] = dense[position]
            bits &= bits - ONE
            number += 1


def rounded(value: Any, dense: Array) -> Any:
    """A value as an entry of `dense`: fp32 where its entries are the bits of bf16 is rounded."""
    raise NotImplementedError


@compiles_to(rounded)
def _rounded(value: Any, dense: Any) -> Any:
    if value == types.float32 and dense.dtype == types.uint16:
        return lambda value, dense: to_bf16(value)
    return lambda value, dense: value


@compiled
def expand_bits(words: Array, offsets: Array, values: Array, dense: Array, scratch: Array) -> None:
    """Write each of `values` to the next kept entry of `dense`, and 0 to all other entries, block
    by block. `offsets` has the number of the first value of each block; `scratch` is memory
    for the values of a block and a word."""
    each = MASK_BLOCK // MASK_WORD
    for block in range(offsets.size - 1):
        kept = values[offsets[block] : offsets[block + 1]]
        for at in range(kept.size):
            scratch[at] = rounded(kept[at], scratch)
        first, number = block * each, 0
        whole = min(first + each, dense.size // MASK_WORD) if MOVES_WORDS else first
        for word in range(first, whole):
            number += lay_word(dense, word * MASK_WORD, words[word], scratch, number)
        rest = dense[whole * MASK_WORD : (first + each) * MASK_WORD]
        for at in range(rest.size):
            rest[at] = 0
        for word in range(whole, min(first + each, words.size)):
            bits = words[word]
            while bits != 0:
                rest[(word - whole) * MASK_WORD + lowest_bit(bits)] = scratch[number]
                bits &= bits - ONE
                number += 1


@compiled
def divide_bits(words: Array, width: int, columns: Array, ends: Array) -> None:
    """Write each kept entry's column and each row's end."""
    at, row, begin = 0, 0, 0
    for word in range(words.size):
        bits = words[word]
        while bits != 0:
            position = word * MASK_WORD + lowest_bit(bits)
            while position >= begin + width:
                ends[row] = at
                row += 1
                begin += width
            columns[at] = position - begin
            at += 1
            bits &= bits - ONE
    ends[row:] = at


@compiled
def divide(positions: Array, width: int, columns: Array, ends: Array) -> None:
    """Write each kept entry's column and each row's end."""
    row, begin = 0, 0
    for at in range(positions.size):
        position = np.int64(positions[at])
        while position >= begin + width:
            ends[row] = at
            row += 1
            begin += width
        columns[at] = position - begin
    ends[row:] = positions.size


@compiled
def nothing(_: Array) -> None:
    """The smallest loop, by which a process finds out whether loops can be compiled."""
