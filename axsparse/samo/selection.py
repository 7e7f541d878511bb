"""Exact selection of the largest scores, without sorting and without a copy of them.

Scores become 32-bit integers of the same order. A histogram of their upper halves finds the bin
that the cut falls into, and a histogram of the lower halves in that bin finds the exact cut.
Histograms of several tensors, on several ranks, are added to select among all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 65_536
CHUNK = 32_768
"""Scores that are read at a time: temporaries of some hundred kB. A multiple of 8, since masks are
packed in bytes."""

Keys: TypeAlias = Callable[[NDArray[np.float32]], NDArray[Any]]
"""From fp32 scores to uint32 numbers in the same order."""

_SIGN = np.uint32(1 << 31)


def by_value(scores: NDArray[np.float32]) -> NDArray[Any]:
    """Keys by which larger scores are better; -0 counts as 0."""
    bits: NDArray[Any] = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def by_magnitude(scores: NDArray[np.float32]) -> NDArray[Any]:
    """Keys by which scores of larger magnitude are better."""
    keys: NDArray[Any] = scores.view(np.uint32) & ~_SIGN
    return keys


@dataclass(frozen=True)
class Cut:
    """Where a selection ends: scores with keys above `key` are kept, and of those with this key the
    first `ties`, by position."""

    key: int
    ties: int


@dataclass(frozen=True)
class Bits:
    """A flat mask in one bit an entry."""

    packed: NDArray[np.uint8]
    numel: int

    def mask(self) -> Tensor:
        """The mask in one byte an entry, bool."""
        bits = np.unpackbits(self.packed, count=self.numel)
        return torch.from_numpy(bits.view(np.bool_))


KEEP_NONE = Cut(2**32 - 1, 0)
"""The cut that keeps nothing."""


def histogram(scores: Tensor, keys: Keys, upper: int | None = None) -> Tensor:
    """How many scores fall into each of 65,536 bins, int64 `(65,536,)`: by the upper halves of
    their keys, or if `upper` is given, by the lower halves of the keys with that upper half.

    `scores` is 1-D fp32 without NaN.
    """
    counts = np.zeros(BINS, dtype=np.int64)
    for _, part in _chunks(scores, keys):
        high = part >> np.uint32(16)
        wanted = high if upper is None else (part & np.uint32(BINS - 1))[high == upper]
        counts += np.bincount(wanted, minlength=BINS)
    return torch.from_numpy(counts)


def cut_bin(counts: Tensor, keep: int) -> tuple[int, int]:
    """The bin in which the `keep`-th largest falls, and how many of that bin are kept.

    `keep` is at least 1 and at most the sum of the counts.
    """
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, torch.tensor(keep)))
    above = int(from_top[place - 1]) if place else 0
    return BINS - 1 - place, keep - above


def find_cut(count: Callable[[int | None], Tensor], keep: int) -> Cut:
    """The cut that keeps exactly `keep` of all scores.

    `count(upper)` is their `histogram`, summed over tensors and ranks; the cut's `ties`
    are of all of them.
    """
    if keep == 0:
        return KEEP_NONE
    upper, inside = cut_bin(count(None), keep)
    lower, ties = cut_bin(count(upper), inside)
    return Cut(upper * BINS + lower, ties)


def equal_to(scores: Tensor, keys: Keys, key: int) -> int:
    """How many scores have exactly this key."""
    return sum(int((part == key).sum()) for _, part in _chunks(scores, keys))


def cut_of(scores: Tensor, keep: int, keys: Keys) -> Cut:
    """The cut that keeps the `keep` largest scores of one tensor, at most all of them."""
    keep = min(keep, scores.numel())
    return find_cut(lambda upper: histogram(scores, keys, upper), keep)


def select(scores: Tensor, keys: Keys, cut: Cut) -> Bits:
    """The packed mask that a cut gives; the scores can be freed before the mask is unpacked."""
    packed = []
    ties = cut.ties
    for _, part in _chunks(scores, keys):
        kept = part > cut.key
        if ties:
            equal = np.flatnonzero(part == cut.key)[:ties]
            kept[equal] = True
            ties -= equal.size
        packed.append(np.packbits(kept))
    return Bits(np.concatenate([*packed, np.empty(0, np.uint8)]), scores.numel())


def largest(scores: Tensor, keep: int, keys: Keys = by_value) -> Tensor:
    """The flat mask of the `keep` largest scores; among equal ones, lower positions first.

    `scores` is 1-D fp32 without NaN.
    """
    return select(scores, keys, cut_of(scores, keep, keys)).mask()


def _chunks(scores: Tensor, keys: Keys) -> Iterator[tuple[int, NDArray[Any]]]:
    """Where each chunk starts, and its keys."""
    values = scores.numpy()
    for start in range(0, values.size, CHUNK):
        yield start, keys(values[start : start + CHUNK])
