"""Kept positions as one bit for each dense entry."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.memory import MASK_BLOCK, MASK_WORD
from axsparse.samo.pieces import (
    PIECE,
    Array,
    Pieces,
    block_offsets,
    collect,
    covering,
    cut,
    gather,
    read_dtype,
    scatter,
)


class MaskIndex:
    """A bit for each dense entry, the lowest of a byte first, and kept entries before each block.

    Bits are read by a compiled loop where numba is installed (the extra `fast`), else
    by numpy, which takes some five times as long and finds the same positions.
    """

    def __init__(self, mask_D: Tensor) -> None:
        numel = mask_D.numel()
        self._offsets = block_offsets(mask_D, MASK_BLOCK)
        bits = np.zeros(-(-numel // MASK_WORD) * MASK_WORD // 8, dtype=np.uint8)
        bits[: -(-numel // 8)] = np.packbits(mask_D.numpy(), bitorder="little")
        self._bits = torch.from_numpy(bits)

    @property
    def kept(self) -> int:
        return int(self._offsets[-1])

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes + self._offsets.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        pieces = self._pieces(start, stop, read_dtype(dense_D.numel()))
        return gather(dense_D, pieces, start, stop)

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        pieces = self._pieces(start, start + values_K.numel(), np.int64)
        scatter(dense_D, pieces, values_K, start)

    def positions(self) -> Tensor:
        return collect(self._pieces(0, self.kept, np.int64), self.kept)

    def _pieces(self, start: int, stop: int, dtype: type[np.signedinteger[Any]]) -> Pieces:
        if start == stop:
            return ()
        compiled = compiled_walk()
        if compiled is None:
            return self._unpacked(start, stop)
        return self._walked(compiled, start, stop, dtype)

    def _walked(
        self,
        compiled: Callable[..., None],
        start: int,
        stop: int,
        dtype: type[np.signedinteger[Any]],
    ) -> Pieces:
        """Pieces of kept entries, read word by word."""
        words, offsets = self._bits.numpy().view("<u8"), self._offsets.numpy()
        buffer = np.empty(min(PIECE, stop - start), dtype=dtype)
        for begin, end in cut(start, stop):
            block = covering(offsets, begin, end).start
            word = block * (MASK_BLOCK // MASK_WORD)
            positions = buffer[: end - begin]
            compiled(words, word, int(offsets[block]), begin, end, positions)
            yield begin, torch.from_numpy(positions)

    def _unpacked(self, start: int, stop: int) -> Pieces:
        """Pieces of dense entries, of which numpy finds those that are kept, as int64."""
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
"""Shifted left by 0 to 63, its top six bits are 64 different numbers."""
TOP_SIX = np.uint64(58)
SHIFT_OF = np.array(
    sorted(range(64), key=lambda shift: (int(DE_BRUIJN) << shift & (1 << 64) - 1) >> 58),
    dtype=np.int64,
)
"""Which shift gives which top six bits."""


def walk(words: Array, word: int, count: int, start: int, stop: int, positions: Array) -> None:
    """Write the positions of the set bits [start, stop); `count` come before `words[word]`.

    `w & -w` is the lowest set bit, and a product with it a shift by its place.
    """
    while count < stop:
        bits = words[word]
        base = word * 64
        word += 1
        while bits != 0 and count < stop:
            if count >= start:
                lowest = bits & (~bits + ONE)
                positions[count - start] = base + SHIFT_OF[(lowest * DE_BRUIJN) >> TOP_SIX]
            bits &= bits - ONE
            count += 1


@cache
def compiled_walk() -> Callable[..., None] | None:
    """`walk` in machine code; None without numba, or with one that does not fit this numpy."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    compiled: Callable[..., None] = numba.njit(nogil=True)(walk)
    return compiled
