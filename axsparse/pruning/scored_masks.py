"""Masks by score: the entries of highest score of each tensor, or of several together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from axsparse.pruning.criteria import Criterion
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Cut, Keys, equal_to, find_cut, histogram, select


@dataclass(frozen=True)
class ScoredMasks:
    """Masks that keep the entries of highest score of each tensor."""

    criterion: Criterion
    kept: Mapping[str, int]
    """How many entries each tensor keeps."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The cuts of the tensors that share one threshold, from `common_cuts`."""

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        keep = self.cuts.get(name, self.kept[name])
        return self.criterion.mask(name, shape, weight, keep, within)


@dataclass(frozen=True)
class ScoredTensor:
    """A tensor of this rank whose scores count in a common threshold."""

    name: str
    shape: Shape
    weight: Weight
    within: Callable[[], Tensor | None] = lambda: None
    """Gives the flat positions that may be kept, or None if all may."""


def common_cuts(
    criterion: Criterion,
    names: Sequence[str],
    own: Iterable[ScoredTensor],
    keep: int,
    total: Callable[[Tensor], Tensor],
) -> tuple[dict[str, int], dict[str, Cut]]:
    """How many entries every tensor keeps, and its cut, if the `keep` highest scores of all stay.

    Among equal scores, those of earlier tensors in `names` stay, then those at lower positions.
    `own` has the tensors that count on this rank; each tensor counts on one rank only. `total`
    sums a vector of integers over all ranks, which call this function together. Only counts
    travel, no weights.
    """
    own = list(own)
    numbers = {name: number for number, name in enumerate(names)}

    def count(upper: int | None) -> Tensor:
        counts = torch.zeros(65_536, dtype=torch.int64)
        for scores, keys in (_scores(criterion, one) for one in own):
            counts += histogram(scores, keys, upper)
        return total(counts)

    cut = find_cut(count, keep)
    found = torch.zeros(2, len(names), dtype=torch.int64)
    for one in own:
        scores, keys = _scores(criterion, one)
        above = select(scores, keys, Cut(cut.key, 0)).mask().sum()
        found[:, numbers[one.name]] = torch.tensor([above, equal_to(scores, keys, cut.key)])
    above_all, equal_all = total(found.view(-1)).view(2, -1).tolist()
    kept, cuts, ties = {}, {}, cut.ties
    for name, above, equal in zip(names, above_all, equal_all, strict=True):
        taken = min(ties, equal)
        ties -= taken
        kept[name], cuts[name] = above + taken, Cut(cut.key, taken)
    return kept, cuts


def _scores(criterion: Criterion, one: ScoredTensor) -> tuple[Tensor, Keys]:
    scores, keys = criterion.scores(one.name, one.shape, one.weight)
    within = one.within()
    return (scores if within is None else scores[within]), keys
