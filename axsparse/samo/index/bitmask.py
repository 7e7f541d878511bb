"""Kept positions as one bit for each dense entry."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import Array, Loop
from axsparse.samo.index.pieces import (
    FEW,
    PIECE,
    Pieces,
    block_offsets,
    collect,
    compiled,
    covering,
    empty_csr,
    gather,
    same_size_integers,
    scatter,
)
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD

MOVE_BITS = Loop("axsparse.samo.index.mask_loops", "move_bits")
DIVIDE_BITS = Loop("axsparse.samo.index.mask_loops", "divide_bits")


class MaskIndex:
    """A bit for each dense entry, the lowest of a byte first, and the number of kept entries before
    each block.

    Without a compiler numpy reads the bits, which takes some four times as long.
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
        loop = compiled(DIVIDE_BITS)
        assert loop is not None, "numba is missing"
        loop(self._bits.numpy().view("<u8"), width, columns, ends)
        return columns, ends

    def _loop(self) -> Loop | None:
        return compiled(MOVE_BITS) if self._numel > FEW else None

    def _move(
        self, loop: Loop, dense_D: Tensor, values_K: Tensor, start: int, *, into_dense: bool
    ) -> None:
        dense, values = same_size_integers(dense_D, values_K, self._numel, self.kept - start)
        offsets, words = self._offsets.numpy(), self._bits.numpy().view("<u8")
        block = covering(offsets, start, start + values.size).start
        before = start - int(offsets[block])
        loop(words, block * (MASK_BLOCK // MASK_WORD), before, dense, values, int(into_dense))

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
