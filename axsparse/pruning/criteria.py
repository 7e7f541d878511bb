"""By which score entries of a tensor are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from axsparse.config.load import LoadedConfig
from axsparse.pruning.pattern import n_of_m, parse_pattern
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Cut, Keys, by_magnitude, by_value, cut_of, select

Score: TypeAlias = Callable[[str, Tensor], Tensor]
"""`score(name, weight)`: a score an entry, in the weight's shape; higher ones are kept. It is
called with one tensor's global name and its fp32 weights (zero where already pruned), on every
rank that holds the tensor, and must depend on nothing else."""


def kept_entries(numel: int, sparsity: float) -> int:
    """How many of a tensor's entries stay: numel − round(sparsity · numel), exactly."""
    return numel - round(sparsity * numel)


@dataclass(frozen=True)
class Criterion:
    """A score for the entries of any tensor, and with `pattern` (n, m) the rule that n of
    every m stay, whatever their number in the whole."""

    score: Literal["magnitude", "random"] | Score
    seed: int = 0
    """Of the random score."""
    pattern: tuple[int, int] | None = None

    def scores(self, name: str, shape: Shape, weight: Weight) -> tuple[Tensor, Keys]:
        """Flat fp32 scores without NaN, and what orders them.

        Raises ConfigError where a score of one's own does not fit its tensor.
        """
        if self.score == "magnitude":
            return weight().view(-1), by_magnitude
        if self.score == "random":
            generator = keyed_generator(self.seed, name, "mask")
            return torch.rand(torch.Size(shape).numel(), generator=generator), by_value
        assert callable(self.score)
        scores = self.score(name, weight().clone())  # which may be written to
        if not isinstance(scores, Tensor) or scores.shape != shape or not _is_plain(scores):
            raise ConfigError(
                f"score of {name}: {_described(scores)}; it must be one number an entry, a dense "
                f"real tensor of shape {shape} on the CPU"
            )
        scores = scores.detach().float().reshape(-1)
        if scores.isnan().any():
            raise ConfigError(f"score of {name}: NaN, which has no order; return numbers")
        return scores, by_value

    def mask(
        self, name: str, shape: Shape, weight: Weight, keep: int | Cut, within: Tensor | None = None
    ) -> Tensor:
        """The flat mask of the entries of highest score, so many or down to a cut, of all or of
        the flat positions `within`; among equal ones, lower positions first."""
        scores, keys = self.scores(name, shape, weight)
        if self.pattern is not None:
            assert within is None, "a pattern is drawn once"
            magnitudes = scores.abs() if keys is by_magnitude else scores
            return n_of_m(magnitudes.view(shape), *self.pattern).view(-1)
        numel = scores.numel()
        if within is not None:
            scores = scores[within]
        cut = keep if isinstance(keep, Cut) else cut_of(scores, keep, keys)
        selected = select(scores, keys, cut)
        del scores  # before there is a byte an entry
        if within is None:
            return selected.mask()
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[within[selected.mask()]] = True
        return mask


def _described(scores: object) -> str:
    if not isinstance(scores, Tensor):
        return type(scores).__name__
    return f"{tuple(scores.shape)} of {scores.dtype}, {scores.layout}, on {scores.device}"


def _is_plain(scores: Tensor) -> bool:
    return (
        scores.layout == torch.strided and scores.device.type == "cpu" and not scores.is_complex()
    )


def configured_criterion(loaded: LoadedConfig, score: Score | None) -> Criterion:
    """The score by which the method of the configuration prunes."""
    config = loaded.config
    pruning = config.pruning
    if pruning.method == "custom" and score is None and pruning.ticket is None:
        raise ConfigError(
            f"{loaded.where('pruning.method')}: custom needs a score of your own; give it to build "
            "in Python (score=…), or choose magnitude"
        )
    if score is not None and pruning.method in ("magnitude", "random", "snip"):
        raise ConfigError(
            f"{loaded.where('pruning.method')}: {pruning.method} has a score already; choose "
            "custom, or a method over time, for the one given to build"
        )
    pattern = None if pruning.pattern is None else parse_pattern(pruning.pattern)
    if score is not None:
        return Criterion(score, config.seed, pattern)
    at_random = pruning.method in ("random", "set", "rigl")
    return Criterion("random" if at_random else "magnitude", config.seed, pattern)
