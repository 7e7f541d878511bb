"""Which entries of a tensor are kept, and how to move values between dense and kept form.

Shape suffixes: `_D` is a dense flat tensor (every entry), `_K` kept entries only, in
ascending position. `start` and `stop` count kept entries.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

INT32_LIMIT = 2**31 - 1


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
        assert mask_D.numel() <= INT32_LIMIT, "callers refuse tensors that int32 cannot index"
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
        dense_D.index_put_((self._positions[start : start + values_K.numel()],), values_K)

    def positions(self) -> Tensor:
        return self._positions.long()


def make_index(mask_D: Tensor) -> Index:
    """The index of a flat boolean mask (True: kept) on the mask's device.

    A mask that keeps everything costs nothing, however the tensor came by it. Raises
    ValueError for a tensor with more entries than int32 can number.
    """
    if mask_D.numel() > INT32_LIMIT:
        raise ValueError(
            f"{mask_D.numel()} entries in one tensor are more than the {INT32_LIMIT} of an int32 "
            "index; leave this tensor dense or split it"
        )
    return FullIndex(mask_D.numel()) if mask_D.all() else Int32Index(mask_D)
