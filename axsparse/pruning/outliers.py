"""Sparsities of layers by their outliers, as OWL spreads them (Yin et al. 2023, arXiv 2310.05175).

An entry of a layer is an outlier if its score is more than `FACTOR` times the mean of the layer's
scores, which are Wanda's: |weight| × norm of its input, of all pruned matrices together. A layer
with more outliers keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from axsparse.pruning.input_statistics import ProductStatistics

FACTOR = 5.0
SPREAD = 0.16
"""The densest layer's density less the sparsest one's: 2 λ of the paper, with its λ of 0.08 for
70 % and more. A mean density or sparsity below it takes its place: no layer keeps less than
nothing, or more than all."""


def outlier_share(
    gathered: Mapping[str, ProductStatistics], masters: Callable[[str], Tensor]
) -> float:
    """The outliers of a layer, as a share of the entries of its pruned matrices.

    `gathered` has the statistics of Wanda of each, and `masters` gives their fp32 weights by name.
    """

    def scores() -> Iterator[Tensor]:
        for name, statistics in gathered.items():
            yield from statistics.scores(masters(name))

    total, entries = 0.0, 0
    for score in scores():
        total, entries = total + float(score.double().sum()), entries + score.numel()
    bound = FACTOR * total / entries
    return sum(int((score > bound).sum()) for score in scores()) / entries


def sparsities(
    shares: Mapping[str, float], entries: Mapping[str, int], mean: float
) -> dict[str, float]:
    """The sparsity of each layer, linear in its share of outliers; all entries of
    the layers together have the sparsity `mean`."""
    least, most = min(shares.values()), max(shares.values())
    unit = min(SPREAD, mean, 1 - mean) / (most - least) if most > least else 0.0
    denser = {name: unit * (share - least) for name, share in shares.items()}
    total = sum(entries[name] for name in shares)
    usual = sum(denser[name] * entries[name] for name in shares) / total
    return {name: mean + usual - more for name, more in denser.items()}
