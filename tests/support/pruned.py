"""Masks for tests that build layers without a configuration, and counts for those with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from axsparse.config.schema import PruningConfig
from axsparse.models.layer import Layer, Model
from axsparse.models.survey import survey
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.distribution import kept_entries
from axsparse.pruning.methods.live_masks import ScoredMasks
from axsparse.pruning.targets import find_targets


def matrices(
    layers: Sequence[Layer],
    sparsity: float,
    method: Literal["magnitude", "random"] = "magnitude",
    *,
    include: Literal["blocks", "all"] = "all",
) -> ScoredMasks:
    """Every trained tensor of two or more dimensions, pruned by itself; without names of ties."""
    kept = {
        f"{layer.name}.{name}": kept_entries(parameter.numel(), sparsity)
        for layer in layers
        if layer.kind == "block" or include == "all"
        for name, parameter in layer.build().named_parameters()
        if parameter.dim() >= 2 and parameter.requires_grad
    }
    return ScoredMasks(Criterion(method, 1), kept)


def kept(model: Model, settings: PruningConfig) -> dict[str, int]:
    """Entries of each pruned tensor that stay, by a configuration."""
    return find_targets(survey(model), settings).kept()
