"""Where a pruned tensor may grow: the strongest of its gradients at pruned positions.

A dense gradient exists for a moment before it is compressed. Of what it says at pruned
positions a bounded list is kept: a few candidates for every entry that is to grow, each with
its gradients summed over the microbatches since it joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.samo.index.base import Index
from axsparse.samo.selection import by_magnitude, largest
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import fits_int32

_NEVER = torch.full((BLOCK,), torch.nan)
"""What stands at kept positions while others are chosen."""


@dataclass(frozen=True)
class Candidates:
    """Pruned positions of one tensor, and the gradients seen there."""

    positions: Tensor
    """Flat, ascending, int32 where that can number the tensor's entries."""
    sums: Tensor
    """fp32, signed, as large as the loss scale makes them."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.positions.nbytes + self.sums.nbytes


def no_candidates(numel: int, count: int) -> Candidates:
    """What stands for a list of `count` where no gradient came: nothing at position 0."""
    return Candidates(torch.zeros(count, dtype=_position_type(numel)), torch.zeros(count))


def strongest(total_D: Tensor, parts: Iterable[Candidates], index: Index, count: int) -> Candidates:
    """The `count` largest in magnitude of `total_D` plus the parts, outside of the index.

    `total_D` is flat, contiguous fp32 where the index is, and is used up; what is chosen is on
    the host. Among equal ones lower positions come
    first. A sum that is no number, or infinite, counts as zero. `count` is at most
    the number of pruned positions. Allocates one byte an entry of the tensor, and blocks.
    """
    assert count <= total_D.numel() - index.kept, "there are fewer positions to choose from"
    for part in parts:
        total_D.index_add_(0, part.positions.to(total_D.device), part.sums.to(total_D.device))
    total_D.nan_to_num_(0.0, 0.0, 0.0)
    for start in range(0, index.kept, BLOCK):
        never = _NEVER[: index.kept - start].to(total_D.device)
        index.scatter(total_D, never, start)
    total_D = total_D.cpu()
    chosen = largest(total_D, count, _by_growth).nonzero().view(-1)
    return Candidates(chosen.to(_position_type(total_D.numel())), total_D[chosen])


def _by_growth(scores: NDArray[np.float32]) -> NDArray[Any]:
    """Larger magnitudes are better, and anything is better than NaN."""
    keys: NDArray[Any] = by_magnitude(scores) + np.uint32(1)
    keys[np.isnan(scores)] = 0
    return keys


def _position_type(numel: int) -> torch.dtype:
    return torch.int32 if fits_int32(numel) else torch.int64
