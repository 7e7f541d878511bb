"""Exact selection of the largest magnitudes on the device that has them.

This works as `samo/selection.py` does, with torch's operations instead of numpy's: histograms of
the upper and lower halves of keys find the cut. Only the histograms are copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from axsparse.samo.selection import BINS, find_cut

PIECE = 1 << 24
"""Scores whose keys are made at a time, which bounds the temporaries to some hundred MB."""
_MAGNITUDE = 0x7FFF_FFFF


def largest_magnitudes(scores: Tensor, keep: int) -> Tensor:
    """The positions of the `keep` largest magnitudes, int64, ascending, on the scores' device.

    `scores` is 1-D fp32; NaN is smaller than all magnitudes, and among equal ones lower positions
    come first. Waits for the device.
    """
    if keep == 0:
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    cut = find_cut(lambda upper: _histogram(scores, upper), keep)
    found, ties = [], cut.ties
    for start, keys in _keys(scores):
        chosen = keys > cut.key
        if ties:
            equal = (keys == cut.key).nonzero().view(-1)[:ties]
            chosen[equal] = True
            ties -= equal.numel()
        found.append(chosen.nonzero().view(-1) + start)
    return torch.cat(found)


def _histogram(scores: Tensor, upper: int | None) -> Tensor:
    """What `selection.histogram` returns, on the host."""
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=scores.device)
    for _, keys in _keys(scores):
        high = keys >> 16
        if upper is not None:
            # Scores outside the bin of the upper halves go to a bin of their own.
            high = torch.where(high == upper, keys & (BINS - 1), BINS)
        counts += torch.bincount(high, minlength=BINS + 1)
    return counts[:BINS].cpu()


def _keys(scores: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Where each piece starts, and int32 keys in the order of its magnitudes; 0 for NaN."""
    for start in range(0, scores.numel(), PIECE):
        part = scores[start : start + PIECE]
        keys = (part.view(torch.int32) & _MAGNITUDE) + 1
        yield start, keys.masked_fill_(part.isnan(), 0)
