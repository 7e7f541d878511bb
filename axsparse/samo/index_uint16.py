"""Kept positions as 16 bits each, within blocks of 65,536 dense entries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.memory import UINT16_BLOCK, fits_int32
from axsparse.samo.pieces import (
    Array,
    Pieces,
    block_offsets,
    collect,
    covering,
    cut,
    gather,
    scatter,
)


class Uint16Index:
    """The low 16 bits of each kept position, and where each block's begin.

    A position is block · 65,536 + low bits, in tensors of any size.
    """

    def __init__(self, mask_D: Tensor) -> None:
        self._offsets = block_offsets(mask_D, UINT16_BLOCK)
        # Half the positions to move where they fit; gathering reads int32 as well as int64.
        self._dtype = np.int32 if fits_int32(mask_D.numel()) else np.int64
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
        return gather(dense_D, self._pieces(start, stop), start, stop)

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        scatter(dense_D, self._pieces(start, start + values_K.numel()), values_K, start)

    def positions(self) -> Tensor:
        return collect(self._pieces(0, self.kept), self.kept)

    def _pieces(self, start: int, stop: int) -> Pieces:
        low, offsets = self._low.numpy(), self._offsets.numpy()
        for begin, end in cut(start, stop):
            yield begin, torch.from_numpy(self._decode(low[begin:end], offsets, begin, end))

    def _decode(self, low: Array, offsets: Array, begin: int, end: int) -> Array:
        blocks = covering(offsets, begin, end)
        counts = np.diff(offsets[blocks.start : blocks.stop + 1].clip(begin, end))
        positions = np.repeat(np.array(blocks, dtype=self._dtype) * UINT16_BLOCK, counts)
        positions += low
        return positions
