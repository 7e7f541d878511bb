"""Kept positions as one bit for each dense entry."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.index.numba_loops import (
    FEW,
    Loop,
    compiled,
    put_word,
    same_size_integers,
    take_word,
)
from axsparse.samo.index.pieces import (
    PIECE,
    Array,
    Pieces,
    block_offsets,
    collect,
    covering,
    empty_csr,
    gather,
    scatter,
)
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD


class MaskIndex:
    """A bit for each dense entry, the lowest of a byte first, and the number of kept entries before
    each block.

    Without a compiler (`numba_loops.py`) numpy reads the bits, which takes some four times as long.
    """

    on_device = None

    def __init__(self, mask_D: Tensor) -> None:
        self._numel = mask_D.numel()
        self._offsets = block_offsets(mask_D, MASK_BLOCK)
        self.kept = int(self._offsets[-1])
        bits = np.zeros(-(-self._numel // MASK_WORD) * MASK_WORD // 8, dtype=np.uint8)
        bits[: -(-self._numel // 8)] = np.packbits(mask_D.numpy(), bitorder="little")
        self._bits = torch.from_numpy(bits)

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes + self._offsets.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        loop = self._loop()
        if loop is None:
            return gather(dense_D, self._pieces(start, stop), start, stop)
        gathered_K = dense_D.new_empty(stop - start)
        self._move(loop, dense_D, gathered_K, start, into_dense=False)
        return gathered_K

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        loop = self._loop()
        if loop is None:
            pieces = self._pieces(start, start + values_K.numel())
            scatter(dense_D, pieces, values_K, start)
        else:
            self._move(loop, dense_D, values_K, start, into_dense=True)

    def positions(self) -> Tensor:
        return collect(self._pieces(0, self.kept), self.kept)

    def csr(self, width: int) -> tuple[Array, Array]:
        """As `Int32Index.csr`."""
        columns, ends = empty_csr(self._numel, self.kept, width)
        loop = compiled(divide_bits)
        assert loop is not None, "numba is missing"
        loop(self._bits.numpy().view("<u8"), width, columns, ends)
        return columns, ends

    def _loop(self) -> Loop | None:
        return compiled(move_bits) if self._numel > FEW else None

    def _move(
        self, loop: Loop, dense_D: Tensor, values_K: Tensor, start: int, *, into_dense: bool
    ) -> None:
        dense, values = same_size_integers(dense_D, values_K, self._numel, self.kept - start)
        offsets, words = self._offsets.numpy(), self._bits.numpy().view("<u8")
        block = covering(offsets, start, start + values.size).start
        before = start - int(offsets[block])
        loop(words, block * (MASK_BLOCK // MASK_WORD), before, dense, values, into_dense)

    def _pieces(self, start: int, stop: int) -> Pieces:
        bits, offsets = self._bits.numpy(), self._offsets.numpy()
        blocks = covering(offsets, start, stop)
        for block in blocks[:: PIECE // MASK_BLOCK]:
            until = min(block + PIECE // MASK_BLOCK, blocks.stop)
            before, after = int(offsets[block]), int(offsets[until])
            begin, end = max(start, before), min(stop, after)
            packed = bits[block * MASK_BLOCK // 8 : until * MASK_BLOCK // 8]
            kept = np.unpackbits(packed, bitorder="little").view(np.bool_)
            positions = np.flatnonzero(kept)[begin - before : end - before]
            positions += block * MASK_BLOCK
            yield begin, torch.from_numpy(positions)


ONE = np.uint64(1)
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
"""A number whose top six bits are different for each of 64 shifts to the left."""
TOP_SIX = np.uint64(58)
SHIFT_OF = np.array(
    sorted(range(64), key=lambda shift: (int(DE_BRUIJN) << shift & (1 << 64) - 1) >> 58),
    dtype=np.int64,
)
"""The shift that gives each value of the top six bits."""


def move_bits(
    words: Array, word: int, before: int, dense: Array, values: Array, into_dense: bool
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
