"""How the kept entries of a matrix are stored to be multiplied; n entries, k of them kept.

    mask     2·k + n/8 + 2·(rows + 2)  bf16 values, one bit an entry; two rows in turn by 64 columns
    list     3·k + 4·(rows + 1)        bf16 values, the distance to the last kept column (1 byte)
    slices   3·k + 5·steps + 4·rows    bf16 values of 16 rows side by side, a byte for the column

A mask is taken where at least an eighth of the entries is kept, else a list, or slices where the
processor multiplies bf16. Slices are the sliced ELLPACK format with rows sorted by their length
(SELL-C-σ: Kreutzer et al. 2014), but for what would fill up short rows: a step of a slice has up to
two entries of each of its rows, out of 64 columns from the first one that is left on, and a bit for
each place says whether there is one. At 90 % zeros three of four places are taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import numpy as np

from axsparse.samo.host.compiled_loops import Array, Loop

MASKED = Loop("axsparse.samo.host.decode_loops", "multiply_masked")
LISTED = Loop("axsparse.samo.host.decode_loops", "multiply_listed")
BF16_MASKED = Loop("axsparse.samo.host.bf16_decode_loops", "multiply_masked")
SLICED = Loop("axsparse.samo.host.bf16_decode_loops", "multiply_sliced")
WORD = 64
"""Columns of a word of the mask, and of a step of a slice."""
ROWS = 2
"""Rows whose words of a mask and values take turns, so that inputs are read once for both, and
values from one place, as the processor's prefetch expects."""
GROUP = 4
"""Entries of a list that are multiplied in one round; rows are filled up with zeros."""
LONGEST = 255
"""The largest distance from one entry of a list, or one step of a slice, to the next."""
SLICE = 16
"""Rows of a slice."""
MOST_TOKENS = 16
"""Tokens that are multiplied at once from the kept entries."""
PARTS = 3
"""Numbers of bf16 whose sum a number in fp32 is."""
SUMS = SLICE * MOST_TOKENS * PARTS
"""Numbers in fp32 that a loop uses for sums, at most."""
AT_ONCE = 256
"""Slices that are made at a time."""
SPARE = 64
"""Values that loops may read before the first one and behind the last one."""


class Encoding(ABC):
    """The kept entries of a matrix `(rows, columns)`, as loops read them."""

    name: ClassVar[str]
    block: ClassVar[int]
    """Rows that are multiplied together."""

    # Reason: each encoding has arrays of its own.
    def __init__(self, shape: tuple[int, ...], loop: Loop, values: Array, *arrays: Array) -> None:
        """A loop gets the addresses of the values and of `arrays`, then rows and columns."""
        rows, columns = self.shape = shape
        self._loop = loop
        self._padded = np.pad(values, SPARE)
        self.values, self.arrays = self._padded[SPARE : SPARE + len(values)], arrays
        addresses = [array.ctypes.data for array in (self._padded[SPARE:], *arrays)]
        self._about = np.array([*addresses, rows, columns], np.int64)
        self.address: int = self._about.ctypes.data

    @cached_property
    def multiply(self) -> Callable[..., None]:
        """The loop over rows, which is compiled when it is first asked for."""
        return self._loop.of_numbers(9)

    @property
    def nbytes(self) -> int:
        return self._padded.nbytes + sum(array.nbytes for array in self.arrays)

    @abstractmethod
    def dense(self) -> Array:
        """The bits of the matrix in bf16, uint16."""


class Masked(Encoding):
    """Values, and one bit for each entry of the matrix; two rows take turns by 64 columns."""

    name, block = "mask", ROWS

    def __init__(self, bits_D: Array, mask_D: Array, *, by_bf16: bool) -> None:
        bits, mask = (self._in_pairs(array) for array in (bits_D, mask_D))
        words = np.packbits(mask, axis=-1, bitorder="little").view(np.uint64)
        first = _first(mask.sum(axis=(1, 2, 3)))
        loop = BF16_MASKED if by_bf16 else MASKED
        super().__init__(bits_D.shape, loop, bits[mask], words, first)

    @classmethod
    def _in_pairs(cls, array_D: Array) -> Array:
        """The entries in the order of the words: `(pairs of rows, words, 2, 64)`."""
        rows, columns = array_D.shape
        padded = np.pad(array_D, ((0, -rows % cls.block), (0, -columns % WORD)))
        shape = -(-rows // cls.block), cls.block, -(-columns // WORD), WORD
        in_pairs: Array = padded.reshape(shape).swapaxes(1, 2)
        return in_pairs

    def dense(self) -> Array:
        rows, columns = self.shape
        mask = np.unpackbits(self.arrays[0].view(np.uint8), axis=-1, bitorder="little")
        pairs = np.zeros(mask.shape, np.uint16)
        pairs[mask.view(bool)] = self.values
        lines = pairs.transpose(0, 2, 1, 3).reshape(len(pairs) * self.block, -1)
        return np.ascontiguousarray(lines[:rows, :columns])


class Listed(Encoding):
    """Values, and the distance of each one's column from the last one's in its row."""

    name, block = "list", 1

    def __init__(self, bits_D: Array, mask_D: Array) -> None:
        rows = len(mask_D)
        row, column = np.nonzero(mask_D)
        last = np.concatenate([[-1], column[:-1]])
        last[np.concatenate([[True], row[1:] != row[:-1]])[: row.size]] = -1
        step = column - last
        between = (step - 1) // LONGEST
        """Entries of value zero before each kept one."""
        each = 1 + between
        lengths = np.bincount(row, weights=each, minlength=rows).astype(np.int64)
        first = _first(-(-lengths // GROUP) * GROUP)
        values, steps = np.zeros(first[-1], np.uint16), np.zeros(first[-1], np.uint8)
        place = first[row] + np.cumsum(each) - 1 - np.concatenate([[0], np.cumsum(lengths)])[row]
        values[place] = bits_D[mask_D]
        steps[place] = step - between * LONGEST
        for number in np.flatnonzero(between):
            steps[place[number] - between[number] : place[number]] = LONGEST
        super().__init__(bits_D.shape, LISTED, values, steps, first)

    def dense(self) -> Array:
        dense = np.zeros(self.shape, np.uint16)
        steps, first = self.arrays
        lengths = np.diff(first)
        ends = np.cumsum(steps, dtype=np.int64)
        before = np.concatenate([[0], ends])[first[:-1]]
        column = ends - np.repeat(before, lengths) - 1
        row = np.repeat(np.arange(len(dense)), lengths)
        # What fills a list up is zero and may stand where an entry is: the entry goes last.
        given = self.values != 0
        dense[row[given], column[given]] = self.values[given]
        return dense


class Sliced(Encoding):
    """Values of 16 rows side by side, step by step."""

    name, block = "slices", SLICE

    def __init__(self, bits_D: Array, mask_D: Array) -> None:
        rows = len(mask_D)
        lengths = mask_D.sum(axis=1)
        order = np.argsort(-lengths, kind="stable").astype(np.int32)
        parts = [
            _steps(bits_D[some], mask_D[some])
            for some in np.split(order, range(AT_ONCE * SLICE, rows, AT_ONCE * SLICE))
        ]
        values, columns, masks, moves, kept, steps = map(np.concatenate, zip(*parts, strict=True))
        first = np.stack([_first(kept), _first(steps)], axis=1)
        columns = np.pad(columns, (0, SPARE))  # which are read in vectors, as values are
        super().__init__(bits_D.shape, SLICED, values, columns, masks, moves, first, order)

    def dense(self) -> Array:
        dense = np.zeros(self.shape, np.uint16)
        columns, masks, moves, first, order = self.arrays
        step, place = np.nonzero(
            np.unpackbits(masks.view(np.uint8), bitorder="little").reshape(-1, 32)
        )
        steps = first[:, 1]
        number = np.repeat(np.arange(len(steps) - 1), np.diff(steps))
        ends = np.cumsum(moves, dtype=np.int64)
        begin = ends - np.concatenate([[0], ends])[steps[:-1]][number]
        row = order[SLICE * number[step] + place // 2]
        dense[row, begin[step] + columns[: row.size]] = self.values
        return dense


def _first(lengths: Array) -> Array:
    """The number of the first of each, and of what would follow the last one."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _steps(bits_D: Array, mask_D: Array) -> tuple[Array, ...]:
    """Of the slices of some rows: values and columns, masks and moves of their steps, and how many
    values and steps each slice has."""
    slices = -(-len(mask_D) // SLICE)
    row, column = np.nonzero(mask_D)
    bits = bits_D[mask_D]
    first = _first(np.bincount(row, minlength=slices * SLICE))
    next_entry, end = first[:-1].reshape(slices, SLICE), first[1:].reshape(slices, SLICE)
    nowhere = mask_D.shape[1] + LONGEST
    column = np.append(column, nowhere)

    def columns_left() -> Array:
        left: Array = np.where(next_entry < end, column[next_entry], nowhere)
        return left

    begin = np.zeros(slices, np.int64)
    nothing = np.zeros((slices, SLICE), bool)
    steps: list[tuple[Array, Array, Array, Array]] = []
    while (next_entry < end).any():
        nearest = columns_left().min(axis=1)
        move = np.where(nearest < nowhere, np.minimum(nearest - begin, LONGEST), 0)
        begin = begin + move
        taken, entries = [], []
        for _ in range(2):
            taken.append(columns_left() < begin[:, None] + WORD)
            entries.append(next_entry)
            next_entry = next_entry + taken[-1]
        steps.append((move, begin, np.stack(taken, axis=2), np.stack(entries, axis=2)))
    at_rest = np.zeros_like(begin), begin, *[np.stack([nothing, nothing], axis=2)] * 2
    moves, begins, kept, entry = (
        np.stack(each, axis=1) for each in zip(*steps, at_rest, at_rest, strict=True)
    )
    kept = kept.reshape(*moves.shape, -1)
    entry = entry.reshape(kept.shape)[kept]
    has_entries = kept.any(axis=2)
    number = np.where(has_entries, np.arange(1, 1 + has_entries.shape[1]), 0).max(axis=1)
    number += number % 2
    is_step = np.arange(has_entries.shape[1]) < number[:, None]
    places = column[entry] - np.broadcast_to(begins[:, :, None], kept.shape)[kept]
    masks = np.packbits(kept[is_step], axis=-1, bitorder="little").view(np.uint32).reshape(-1)
    numbers = kept.sum(axis=(1, 2)), number
    return bits[entry], places.astype(np.uint8), masks, moves[is_step].astype(np.uint8), *numbers
