"""Loops over kept positions, which `samo/host/compiled_loops.py` has compiled.

They are plain Python over arrays and numbers, and do the same there, word by word.
"""

from __future__ import annotations

import numpy as np

from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.state_bytes import MASK_WORD

ONE = np.uint64(1)
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
"""A number whose top six bits are different for each of 64 shifts to the left."""
TOP_SIX = np.uint64(58)
SHIFT_OF = np.array(
    sorted(range(64), key=lambda shift: (int(DE_BRUIJN) << shift & (1 << 64) - 1) >> 58),
    dtype=np.int64,
)
"""The shift that gives each value of the top six bits."""


def take_word(dense: Array, at: int, bits: int, values: Array, number: int) -> int:
    """Copy the entries of 64, from `at` on, whose bits are set in a word, lowest first, to `values`
    from `number` on.

    Returns how many there are; −1, having done nothing, outside of a compiled loop and where the
    processor has no instructions for it. Of `values`, 64 entries must exist, and those behind the
    copied ones may get any numbers.
    """
    return -1


def put_word(dense: Array, at: int, bits: int, values: Array, number: int) -> int:
    """Copy entries of `values` from `number` on to those of `dense` that `take_word` reads; else
    like `take_word`."""
    return -1


def move_bits(
    words: Array, word: int, before: int, dense: Array, values: Array, into_dense: int
) -> None:
    """Copy all of `values` to or from the kept entries, beginning `before` set bits after the start
    of `word`.

    Words move whole where the processor has instructions for it. Elsewhere, and at both ends, bits
    move one by one: `w & -w` is the lowest set bit of a word, and a product with it is a shift by
    its place.
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
                lowest = bits & (~bits + ONE)
                position = base + SHIFT_OF[(lowest * DE_BRUIJN) >> TOP_SIX]
                if into_dense:
                    dense[position] = values[number]
                else:
                    values[number] = dense[position]
            bits &= bits - ONE
            number += 1


def divide_bits(words: Array, width: int, columns: Array, ends: Array) -> None:
    """Write each kept entry's column and each row's end."""
    at, row, begin = 0, 0, 0
    for word in range(words.size):
        bits = words[word]
        while bits != 0:
            lowest = bits & (~bits + ONE)
            position = word * MASK_WORD + SHIFT_OF[(lowest * DE_BRUIJN) >> TOP_SIX]
            while position >= begin + width:
                ends[row] = at
                row += 1
                begin += width
            columns[at] = position - begin
            at += 1
            bits &= bits - ONE
    ends[row:] = at


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


def nothing(_: Array) -> None:
    """The smallest loop, by which a process finds out whether loops can be compiled."""
