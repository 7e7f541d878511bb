"""Where masks come from, for whoever builds or shrinks state."""

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
    """The entries of highest score of each tensor, by count or down to a common cut."""

    criterion: Criterion
    kept: Mapping[str, int]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Of the tensors that share one threshold, from `common_cuts`."""

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        keep = self.cuts.get(name, self.kept[name])
        return self.criterion.mask(name, shape, weight, keep, within)


@dataclass(frozen=True)
class ScoredTensor:
    """One tensor of this rank whose scores count in a common threshold."""

    name: str
    shape: Shape
    weight: Weight
    within: Callable[[], Tensor | None] = lambda: None
    """Flat positions that may be kept; None: all."""


def common_cuts(
    criterion: Criterion,
    names: Sequence[str],
    own: Iterable[ScoredTensor],
    keep: int,
    total: Callable[[Tensor], Tensor],
) -> tuple[dict[str, int], dict[str, Cut]]:
    """Kept entries and cut of every tensor, such that the `keep` highest scores of all stay.

    Among equal scores, earlier tensors of `names` come first, then lower positions. `own`
    are the tensors that count on this rank, each on one rank. `total` sums a vector of
    integers over all ranks, which call this together; no weights travel.
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
