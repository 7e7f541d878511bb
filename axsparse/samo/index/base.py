"""Which entries of a tensor are kept, and how to move values between dense and kept form.

All encodings give the same bits; they differ in bytes (`samo/state_bytes.py`) and in time
(docs/decisions/009-index-encodings.md).

Shape suffixes: `_D` is a dense flat tensor (every entry), `_K` kept entries only, in
ascending position. `start` and `stop` count kept entries.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from axsparse.runtime.errors import ConfigError
from axsparse.samo.index.bitmask import MaskIndex
from axsparse.samo.index.pieces import Pieces, cut, scatter
from axsparse.samo.index.uint16 import Uint16Index
from axsparse.samo.state_bytes import INT32_LIMIT, IndexKind, fits_int32


class Index(Protocol):
    """The kept positions of one tensor, shared by all of its compressed states."""

    @property
    def kept(self) -> int:
        """Kept entries."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        ...

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        """The kept entries [start, stop) of a dense flat tensor; may be a view of it."""
        ...

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        """Write values to the kept entries from `start` on; all else stays as it is."""
        ...

    def positions(self) -> Tensor:
        """Flat positions of all kept entries, int64, ascending (for re-masking and files)."""
        ...


class FullIndex:
    """Every entry is kept: dense tensors, at no cost."""

    nbytes = 0

    def __init__(self, numel: int) -> None:
        self.kept = numel

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        return dense_D[start:stop]

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        dense_D[start : start + values_K.numel()].copy_(values_K)

    def positions(self) -> Tensor:
        return torch.arange(self.kept)


class Int32Index:
    """The paper's index: one int32 flat position a kept entry."""

    def __init__(self, mask_D: Tensor) -> None:
        self._positions = mask_D.nonzero().view(-1).to(torch.int32)

    @property
    def kept(self) -> int:
        return self._positions.numel()

    @property
    def nbytes(self) -> int:
        return self._positions.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        return dense_D.index_select(0, self._positions[start:stop])

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        stop = start + values_K.numel()
        pieces: Pieces = ((begin, self._positions[begin:end]) for begin, end in cut(start, stop))
        scatter(dense_D, pieces, values_K, start)

    def positions(self) -> Tensor:
        return self._positions.long()


def make_index(mask_D: Tensor, kind: IndexKind = "int32") -> Index:
    """The index of a flat boolean mask (True: kept).

    A mask that keeps everything costs nothing, however the tensor came by it. Raises
    ConfigError for a tensor with more entries than int32 can number.
    """
    if kind == "int32" and not fits_int32(mask_D.numel()):
        raise ConfigError(
            f"samo.index: int32 numbers {INT32_LIMIT} entries of a tensor and this one has "
            f"{mask_D.numel()}; choose uint16, mask or auto"
        )
    if mask_D.all():
        return FullIndex(mask_D.numel())
    if kind == "int32":
        return Int32Index(mask_D)
    return Uint16Index(mask_D) if kind == "uint16" else MaskIndex(mask_D)
