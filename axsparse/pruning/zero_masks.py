"""Masks of the zeros in loaded weights, which is how other tools leave a pruned model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.config.schema import PruningConfig
from axsparse.pruning.pattern import crowded_groups, parse_pattern
from axsparse.pruning.targets import Targets
from axsparse.runtime.errors import ConfigError
from axsparse.samo.masks import Shape, Weight

TOLERANCE = 0.01
"""How far `pruning.sparsity`, with which runs are planned, may be from the sparsity found."""


@dataclass(frozen=True)
class ZeroMasks:
    """Masks that keep every entry that is not zero. Tensors without zeros stay dense."""

    kept: Mapping[str, int]

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        assert within is None, "zeros are looked for once, in weights that nobody has pruned here"
        mask: Tensor = weight().view(-1) != 0
        assert mask.numel() == math.prod(shape) and int(mask.sum()) == self.kept[name], name
        return mask


@dataclass(frozen=True)
class FoundZeros:
    """What the weights of all stages have, by tensor in the order of the targets."""

    targets: Targets
    kept: Mapping[str, int]
    """Entries that are not zero."""
    crowded: Mapping[str, int]
    """Groups that have more such entries than `pruning.pattern` allows."""

    def masks(self, pruning: PruningConfig) -> ZeroMasks:
        """The masks; ConfigError where the zeros are not what the settings say."""
        if pruning.pattern is not None:
            for name, groups in self.crowded.items():
                if groups:
                    n, m = parse_pattern(pruning.pattern)
                    raise ConfigError(
                        f"pruning.pattern: {pruning.pattern}, but {groups} groups of {m} in {name} "
                        f"have more than {n} entries that are not zero; leave the pattern out, or "
                        f"name the tensor in pruning.exclude"
                    )
        numel = {name: math.prod(shape) for name, shape in self.targets.shapes.items()}
        sparsity = 1 - sum(self.kept.values()) / sum(numel.values())
        if sparsity == 0:
            raise ConfigError(
                "pruning.method: zeros, but no pruned tensor of the loaded weights has a zero; "
                "load weights that were pruned, or choose magnitude"
            )
        if pruning.pattern is None and abs(sparsity - pruning.sparsity) > TOLERANCE:
            raise ConfigError(
                f"pruning.sparsity: {pruning.sparsity:g}, with which the run was planned, but "
                f"{sparsity:.4f} of the loaded weights is zero; set it to {sparsity:.2f}"
            )
        return ZeroMasks(self.kept)


def find_zeros(
    targets: Targets,
    pattern: tuple[int, int] | None,
    values: Iterable[tuple[str, Callable[[], Tensor]]],
    total: Callable[[Tensor], Tensor],
) -> FoundZeros:
    """Look for zeros in the weights of all stages, one tensor at a time.

    `values` has, by name, functions that give the initial weights of the tensors that count on
    this rank. `total` sums a vector of integers over all ranks, which call this together.
    """
    numbers = {name: number for number, name in enumerate(targets.shapes)}
    found = torch.zeros(2, len(numbers), dtype=torch.int64)
    for name, value in values:
        if name in numbers:
            stays = value() != 0
            crowded = 0 if pattern is None else crowded_groups(stays, *pattern)
            found[:, numbers[name]] = torch.tensor([int(stays.sum()), crowded])
            del stays
    kept, crowded_of = total(found.view(-1)).view(2, -1).tolist()
    return FoundZeros(
        targets, dict(zip(numbers, kept, strict=True)), dict(zip(numbers, crowded_of, strict=True))
    )
