"""Where a pruned tensor may grow: the strongest of its gradients at pruned positions.

A dense gradient exists for a moment before it is compressed. Of its values at pruned positions a
bounded list is kept: a few candidates for every entry that is to grow, each with its gradients
summed over the microbatches since it joined the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo.index.base import Index
from axsparse.samo.selection import by_magnitude, largest
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import fits_int32

_NEVER = torch.full((BLOCK,), torch.nan)
"""Written to kept positions, so that only pruned ones are chosen."""


@dataclass(frozen=True)
class Candidates:
    """Pruned positions of one tensor, and the gradients seen there."""

    positions: Tensor
    """Flat, ascending, int32 where that can number the tensor's entries."""
    sums: Tensor
    """Their summed gradients, fp32, still multiplied by the loss scale."""

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.positions.nbytes + self.sums.nbytes


def no_candidates(numel: int, count: int) -> Candidates:
    """The list of `count` for a tensor that got no gradient: zeros at position 0."""
    return Candidates(torch.zeros(count, dtype=_position_type(numel)), torch.zeros(count))


def strongest(total_D: Tensor, parts: Iterable[Candidates], index: Index, count: int) -> Candidates:
    """The `count` entries of `total_D` plus `parts` with the largest magnitude at pruned positions.

    `total_D` is flat, contiguous fp32 on the device of the index, and is overwritten; the result is
    on the host. Among equal magnitudes lower positions come first. A sum that is NaN or infinite
    counts as zero. `count` is at most the number of pruned positions. Allocates one byte an entry
    of the tensor, and blocks. The choice is made where `total_D` is.
    """
    assert count <= total_D.numel() - index.kept, "there are fewer positions to choose from"
    for part in parts:
        total_D.index_add_(0, part.positions.to(total_D.device), part.sums.to(total_D.device))
    total_D.nan_to_num_(0.0, 0.0, 0.0)
    for start in range(0, index.kept, BLOCK):
        never = _NEVER[: index.kept - start].to(total_D.device)
        index.scatter(total_D, never, start)
    chosen = largest(total_D, count, _by_growth).nonzero().view(-1)
    positions, sums = chosen.to(_position_type(total_D.numel())), total_D[chosen]
    return Candidates(positions.cpu(), sums.cpu())


def _by_growth(scores: Tensor) -> Tensor:
    """Keys by which larger magnitudes are better, and NaN is worst."""
    return by_magnitude(scores).masked_fill_(scores.isnan(), -1)


def _position_type(numel: int) -> torch.dtype:
    return torch.int32 if fits_int32(numel) else torch.int64
