"""Kept positions as 16 bits each, within blocks of 65,536 dense entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.memory import UINT16_BLOCK
from axsparse.samo.pieces import (
    PIECE,
    Pieces,
    block_offsets,
    collect,
    covering,
    cut,
    gather,
    read_dtype,
    scatter,
)


class Uint16Index:
    """The low 16 bits of each kept position, and where each block's begin.

    A position is block · 65,536 + low bits, in tensors of any size.
    """

    def __init__(self, mask_D: Tensor) -> None:
        self._offsets = block_offsets(mask_D, UINT16_BLOCK)
        low = np.empty(self.kept, dtype=np.uint16)
        offsets = self._offsets.tolist()
        for block, piece in enumerate(mask_D.split(UINT16_BLOCK)):
            low[offsets[block] : offsets[block + 1]] = np.flatnonzero(piece.numpy())
        self._low = torch.from_numpy(low)

    @property
    def kept(self) -> int:
        return int(self._offsets[-1])

    @property
    def nbytes(self) -> int:
        return self._low.nbytes + self._offsets.nbytes

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
            return
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
