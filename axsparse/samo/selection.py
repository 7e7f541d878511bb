"""Exact selection of the largest scores, without sorting and without a copy of them.

Scores become 32-bit integers of the same order. A histogram of their upper halves finds the bin
that the threshold falls into, and a histogram of the lower halves in that bin finds the threshold.
Histograms of several tensors, on several ranks, are added to select among all of them. Scores may
be on any device; only the histograms are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

BINS = 65_536
HALF = BINS // 2
CHUNK = 131_072
"""Scores that a CPU reads at a time: one or two MB. A multiple of 8, as masks are bits."""
DEVICE_CHUNK = 1 << 24
"""The same on a GPU, where every operation costs a launch: temporaries of some hundred MB."""

Keys: TypeAlias = Callable[[Tensor], Tensor]
"""From fp32 scores to int32 numbers in the same order."""

_MAGNITUDE = 0x7FFF_FFFF


def by_value(scores: Tensor) -> Tensor:
    """Keys by which larger scores are better; -0 counts as 0."""
    bits = (scores + 0.0).view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(_MAGNITUDE))


def by_magnitude(scores: Tensor) -> Tensor:
    """Keys by which scores of larger magnitude are better."""
    return scores.view(torch.int32) & _MAGNITUDE


@dataclass(frozen=True)
class Threshold:
    """The threshold of a selection: scores with keys above `key` are kept, and of the scores with
    this key the first `ties`, by position."""

    key: int
    ties: int


def pack(mask_D: Tensor) -> Tensor:
    """The bits of a flat bool mask, uint8, as files have them: the first entry in the highest bit
    of the first byte, and the last byte filled up with zeros."""
    assert mask_D.dtype == torch.bool and mask_D.dim() == 1
    return torch.from_numpy(np.packbits(mask_D.numpy()))


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The flat bool mask of `numel` entries of which `pack` has made bits."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel).view(np.bool_))


def count_kept(packed: Tensor) -> int:
    """How many bits are set."""
    parts = packed.split(CHUNK)
    return sum(int(np.unpackbits(part.numpy()).sum(dtype=np.int64)) for part in parts)


def histogram(scores: Tensor, keys: Keys, upper: int | None = None) -> Tensor:
    """How many scores fall into each of 65,536 bins, int64 `(65,536,)` on the host: by the upper
    halves of their keys, or if `upper` is given, by the lower halves of the keys in that bin.

    `scores` is 1-D fp32 without NaN.
    """
    counts = torch.zeros(BINS, dtype=torch.int64, device=scores.device)
    for part in _chunks(scores, keys):
        bins = (part >> 16).add_(HALF)
        if upper is not None:
            bins = part[bins == upper].bitwise_and_(BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
    return counts.cpu()


def threshold_bin(counts: Tensor, keep: int) -> tuple[int, int]:
    """The bin in which the `keep`-th largest falls, and how many of that bin are kept.

    `keep` is at least 1 and at most the sum of the counts.
    """
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, torch.tensor(keep)))
    above = int(from_top[place - 1]) if place else 0
    return BINS - 1 - place, keep - above


def find_threshold(count: Callable[[int | None], Tensor], keep: int) -> Threshold:
    """The threshold that keeps exactly `keep` of all scores.

    `count(upper)` is their `histogram`, summed over tensors and ranks; the threshold's `ties`
    are of all of them.
    """
    if keep == 0:
        return Threshold(2**31 - 1, 0)
    upper, inside = threshold_bin(count(None), keep)
    lower, ties = threshold_bin(count(upper), inside)
    return Threshold((upper - HALF) * BINS + lower, ties)


def counts_at(scores: Tensor, keys: Keys, key: int) -> Tensor:
    """How many scores have larger keys, and how many exactly this one, int64 `(2,)` on the host."""
    counts = torch.zeros(2, dtype=torch.int64, device=scores.device)
    for part in _chunks(scores, keys):
        counts += torch.stack([(part > key).sum(), (part == key).sum()])
    return counts.cpu()


def threshold_of(scores: Tensor, keep: int, keys: Keys) -> Threshold:
    """The threshold that keeps the `keep` largest scores of one tensor, at most all of them."""
    keep = min(keep, scores.numel())
    return find_threshold(lambda upper: histogram(scores, keys, upper), keep)


def select(scores: Tensor, keys: Keys, threshold: Threshold) -> Tensor:
    """The mask that a threshold gives of scores on the host, as `pack` has it: the scores can be
    freed before the mask is unpacked."""
    packed = [pack(kept) for kept in _kept(scores, keys, threshold)]
    return torch.cat([*packed, torch.empty(0, dtype=torch.uint8)])


def largest(scores: Tensor, keep: int, keys: Keys = by_value) -> Tensor:
    """The flat mask of the `keep` largest scores, on their device; among equal ones, lower
    positions first.

    `scores` is 1-D fp32 without NaN.
    """
    parts = [*_kept(scores, keys, threshold_of(scores, keep, keys))]
    return torch.cat([*parts, scores.new_empty(0, dtype=torch.bool)])


def _kept(scores: Tensor, keys: Keys, threshold: Threshold) -> Iterator[Tensor]:
    """The mask that a threshold gives, in chunks."""
    ties = threshold.ties
    for part in _chunks(scores, keys):
        kept = part > threshold.key
        if ties:
            equal = (part == threshold.key).nonzero().view(-1)[:ties]
            kept[equal] = True
            ties -= equal.numel()
        yield kept


def _chunks(scores: Tensor, keys: Keys) -> Iterator[Tensor]:
    for part in scores.split(CHUNK if scores.is_cpu else DEVICE_CHUNK):
        yield keys(part)
