"""Kept positions as 16 bits each, within blocks of 65,536 dense entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.index.numba_loops import (
    AHEAD,
    FEW,
    Loop,
    compiled,
    prefetch,
    same_size_integers,
)
from axsparse.samo.index.pieces import (
    PIECE,
    Array,
    Pieces,
    block_offsets,
    collect,
    covering,
    cut,
    empty_csr,
    gather,
    read_dtype,
    scatter,
)
from axsparse.samo.state_bytes import UINT16_BLOCK


class Uint16Index:
    """The low 16 bits of each kept position, and the number of kept entries before each block.

    A position is block · 65,536 + low bits, in tensors of any size.
    """

    on_device = None

    def __init__(self, mask_D: Tensor) -> None:
        self._numel = mask_D.numel()
        self._offsets = block_offsets(mask_D, UINT16_BLOCK)
        self.kept = int(self._offsets[-1])
        low = np.empty(self.kept, dtype=np.uint16)
        offsets = self._offsets.tolist()
        for block, piece in enumerate(mask_D.split(UINT16_BLOCK)):
            low[offsets[block] : offsets[block + 1]] = np.flatnonzero(piece.numpy())
        self._low = torch.from_numpy(low)

    @property
    def nbytes(self) -> int:
        return self._low.nbytes + self._offsets.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        loop = self._loop()
        if loop is None:
            pieces = self._pieces(start, stop, read_dtype(dense_D.numel()))
            return gather(dense_D, pieces, start, stop)
        gathered_K = dense_D.new_empty(stop - start)
        self._move(loop, dense_D, gathered_K, start, into_dense=False)
        return gathered_K

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        loop = self._loop()
        if loop is None:
            pieces = self._pieces(start, start + values_K.numel(), np.int64)
            scatter(dense_D, pieces, values_K, start)
        else:
            self._move(loop, dense_D, values_K, start, into_dense=True)

    def positions(self) -> Tensor:
        return collect(self._pieces(0, self.kept, np.int64), self.kept)

    def csr(self, width: int) -> tuple[Array, Array]:
        """As `Int32Index.csr`."""
        columns, ends = empty_csr(self._numel, self.kept, width)
        loop = compiled(divide_low)
        assert loop is not None, "numba is missing"
        loop(self._low.numpy(), self._offsets.numpy()[1:], width, columns, ends)
        return columns, ends

    def _loop(self) -> Loop | None:
        return compiled(move_low) if self._numel > FEW else None

    def _move(
        self, loop: Loop, dense_D: Tensor, values_K: Tensor, start: int, *, into_dense: bool
    ) -> None:
        dense, values = same_size_integers(dense_D, values_K, self._numel, self.kept - start)
        offsets = self._offsets.numpy()
        block = covering(offsets, start, start + values.size).start
        ends, dense = offsets[block + 1 :], dense[block * UINT16_BLOCK :]
        loop(self._low.numpy(), ends, start, dense, values, into_dense)

    def _pieces(self, start: int, stop: int, dtype: type[np.signedinteger[Any]]) -> Pieces:
        low, offsets = self._low.numpy(), self._offsets.numpy()
        blocks = covering(offsets, start, stop)
        block, ends = blocks.start, offsets[blocks.start + 1 : blocks.stop + 1].tolist()
        buffer = np.empty(min(PIECE, stop - start), dtype=dtype)
        for begin, end in cut(start, stop):
            positions = buffer[: end - begin]
            positions[:] = low[begin:end]
            at = begin
            while at < end:
                until = min(ends[block - blocks.start], end)
                positions[at - begin : until - begin] += block * UINT16_BLOCK
                if until < end:
                    block += 1
                at = until
            yield begin, torch.from_numpy(positions)


def move_low(
    low: Array, ends: Array, start: int, dense: Array, values: Array, into_dense: bool
) -> None:
    """Copy all of `values` to or from the kept entries from `start` on.

    `dense` begins with the block that entry `start` is in, `ends` with that block's last entry.
    """
    at, stop = start, start + values.size
    block = 0
    while at < stop:
        own = dense[block * UINT16_BLOCK :]
        until = min(ends[block], stop)
        block += 1
        if into_dense:
            for number in range(at, until):
                own[np.int64(low[number])] = values[number - start]
        else:
            for number in range(at, until):
                prefetch(own, np.int64(low[number]) + AHEAD)
                values[number - start] = own[np.int64(low[number])]
        at = until


def divide_low(low: Array, stops: Array, width: int, columns: Array, ends: Array) -> None:
    """Write each kept entry's column and each row's end; `stops` has the ends of blocks."""
    at, row, begin = 0, 0, 0
    for block in range(stops.size):
        base = block * UINT16_BLOCK
        while at < stops[block]:
            position = base + np.int64(low[at])
            while position >= begin + width:
                ends[row] = at
                row += 1
                begin += width
            columns[at] = position - begin
            at += 1
    ends[row:] = at
