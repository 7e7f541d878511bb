"""Draws masks from the live state of all ranks, and applies them to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from axsparse.config.schema import PruningConfig
from axsparse.models.layer import Ties
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.mask_file import write_masks
from axsparse.pruning.targets import Targets, initial_share
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.errors import ConfigError, everywhere
from axsparse.runtime.grid import RankCoords
from axsparse.samo.layer_construction import BuiltLayer, StateOptions
from axsparse.samo.layer_state import LayerState
from axsparse.samo.masks import Masks, Shape, Weight, kept_positions, prune_in_place
from axsparse.samo.selection import Keys, Threshold, counts_at, find_threshold, histogram
from axsparse.samo.tensor_state import TensorState


@dataclass(frozen=True)
class LiveMasks:
    """The pruned tensors of one rank, and the other ranks to agree with on their masks."""

    layers: Sequence[BuiltLayer]
    ties: Ties
    targets: Targets
    options: StateOptions
    coords: RankCoords
    transport: Transport

    def pruned(self) -> Iterator[tuple[str, LayerState, TensorState]]:
        """The tensors of this rank to prune, each with the name of its weight's first use; a weight
        with uses on two stages appears on both."""
        for layer in self.layers:
            for name, tensor in layer.state.by_full_name.items():
                owner = self.ties.get(name, name)
                if owner in self.targets.shapes:
                    yield owner, layer.state, tensor

    def counted(self) -> Iterator[tuple[str, LayerState, TensorState]]:
        """The pruned tensors whose weight has its first use here; each weight counts once."""
        yield from (own for own in self.pruned() if own[0] == own[2].full_name)

    def total(self, counts: Tensor) -> Tensor:
        """The sum over the stages of one replica; see `stage_total`."""
        return stage_total(self.coords, self.transport, counts)

    def masks(self, criterion: Criterion, at: Callable[[float], float]) -> ScoredMasks:
        """Masks by the present weights, at sparsity `at(final)`; all ranks call this together."""
        own = (
            (
                owner,
                partial(state.dense_master, tensor.full_name),
                partial(kept_positions, state, tensor),
            )
            for owner, state, tensor in self.counted()
        )
        return scored_masks(self.targets, criterion, own, at, self.total)

    def prune(self, masks: Masks) -> None:
        """Shrink the state to the entries that the masks keep, one tensor at a time."""
        prune_in_place(self.layers, self.ties, masks)

    def save(self, path: str | Path) -> None:
        """Write the entries that are kept now to a mask file; all ranks call this together. Raises
        OutputError on all ranks alike."""
        masks = {name: partial(state.mask, name) for name, state, _ in self.counted()}
        shapes = self.targets.shapes
        write_masks(path, shapes, masks, transport=self.transport, coords=self.coords)

    def figures(self) -> dict[str, float]:
        """The present sparsity of all pruned tensors of the model; all ranks call this together."""
        here = [tensor for _, _, tensor in self.counted()]
        counts = [sum(t.full_kept for t in here), sum(t.full_numel for t in here)]
        kept, numel = self.total(torch.tensor(counts)).tolist()
        return {"sparsity": 1 - kept / numel}


def stage_total(coords: RankCoords, transport: Transport, counts: Tensor) -> Tensor:
    """A vector of whole numbers, summed over the stages of the first replica, of which the first
    tensor-parallel rank counts; all ranks call this together."""
    counts_here = coords.replica == 0 == coords.tp_rank
    sums = counts.double() if counts_here else torch.zeros_like(counts).double()
    wait(transport.world.start(Op.ALL_REDUCE, sums), transport.backoff)
    return sums.long()


@dataclass(frozen=True)
class ScoredMasks:
    """Masks that keep the entries of highest score of each tensor."""

    criterion: Criterion
    kept: Mapping[str, int]
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    """For tensors that share one threshold, the threshold with each one's ties."""

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        keep = self.thresholds.get(name, self.kept[name])
        return self.criterion.mask(name, shape, weight, keep, within)


Scored: TypeAlias = tuple[str, Weight, Callable[[], Tensor | None]]
"""A tensor of this rank: its name, its weights, and the flat positions that may be kept, None if
all may."""


def masks_of_start(
    targets: Targets,
    criterion: Criterion,
    values: Iterable[tuple[str, Weight]],
    total: Callable[[Tensor], Tensor],
) -> ScoredMasks:
    """Masks by the initial weights, drawn before any state is built. `values` has, by name,
    functions that give the initial weights of the tensors that count on this rank."""
    own = ((name, value, lambda: None) for name, value in values if name in targets.shapes)
    return scored_masks(targets, criterion, own, lambda final: final, total)


def scored_masks(
    targets: Targets,
    criterion: Criterion,
    own: Iterable[Scored],
    at: Callable[[float], float],
    total: Callable[[Tensor], Tensor],
) -> ScoredMasks:
    """Masks by score for the targets, with a common threshold if their distribution is global.

    `own` has the tensors that count on this rank; each tensor counts on one rank only. `at` maps a
    final sparsity to the present one. `total` sums a vector of integers over all ranks, which call
    this function together. Only counts travel, no weights.
    """
    kept, common = targets.kept(at), targets.common
    criterion = replace(criterion, input_dims=targets.input_dims)
    if not common:
        return ScoredMasks(criterion, kept)
    numel = sum(math.prod(targets.shapes[name]) for name in common)
    keep = numel - round(at(targets.sparsity) * numel)
    among = [one for one in own if one[0] not in targets.own]

    def scores(
        name: str, weight: Weight, within: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Keys]:
        scores, keys = criterion.scores(name, targets.shapes[name], weight)
        places = within()
        return (scores if places is None else scores[places]), keys

    def count(upper: int | None) -> Tensor:
        counts = torch.zeros(65_536, dtype=torch.int64)
        for one in among:
            counts += histogram(*scores(*one), upper)
        return total(counts)

    threshold = find_threshold(count, keep)
    key, ties = threshold.key, threshold.ties
    numbers = {name: number for number, name in enumerate(common)}
    counts = torch.zeros(2, len(common), dtype=torch.int64)
    for one in among:
        counts[:, numbers[one[0]]] = counts_at(*scores(*one), key)
    above_all, equal_all = total(counts.view(-1)).view(2, -1).tolist()
    # Among equal scores, entries of earlier tensors stay, then entries at lower positions.
    thresholds = {}
    for name, above, equal in zip(common, above_all, equal_all, strict=True):
        taken = min(ties, equal)
        ties -= taken
        kept[name], thresholds[name] = above + taken, Threshold(key, taken)
    return ScoredMasks(criterion, kept, thresholds)


# -- zeros of loaded weights, which is how other tools leave a pruned model -------------

TOLERANCE = 0.01
"""How far `pruning.sparsity`, with which runs are planned, may be from the sparsity found."""


def masks_of_zeros(
    targets: Targets,
    pruning: PruningConfig,
    values: Iterable[tuple[str, Weight]],
    total: Callable[[Tensor], Tensor],
) -> ScoredMasks:
    """Masks that keep every entry that is not zero of the weights of all stages; ConfigError, on
    all ranks alike, where the zeros do not fit the settings. Tensors of zeros alone stay dense:
    nobody has pruned them, they were initialized so.

    `values` has, by name, functions that give the initial weights of the tensors that count on
    this rank, one at a time. `total` sums a vector of integers over all ranks, which call this
    together.
    """
    numbers = {name: number for number, name in enumerate(targets.shapes)}
    counts = torch.zeros(len(numbers), dtype=torch.int64)
    for name, value in values:
        if name in numbers:
            counts[numbers[name]] = value().count_nonzero()
    entries = {name: math.prod(shape) for name, shape in targets.shapes.items()}
    kept = dict(zip(entries, total(counts).tolist(), strict=True))
    kept = {name: number or entries[name] for name, number in kept.items()}
    numel, final = sum(entries.values()), targets.sparsity
    sparsity = 1 - sum(kept.values()) / numel
    share = initial_share(pruning) or 1.0
    planned = share * sum(n * targets.own.get(name, final) for name, n in entries.items()) / numel
    if sparsity == 0 or abs(sparsity - planned) > TOLERANCE:
        key = "initial_sparsity" if pruning.initial_sparsity else "sparsity"
        given = pruning.initial_sparsity or final
        right = min(max(given * sparsity / planned, 0.0001), 0.9999)
        way = f"set it to {right:.4f}{' instead of pruning.pattern' * bool(pruning.pattern)}"
        if not sparsity:
            way = "set pruning.include: all if those of other layers have zeros"
        raise everywhere(
            ConfigError(
                f"pruning.{key}: {given:g}, with which the run was planned, but {sparsity:.4f} of "
                f"the loaded weights is zero; {way}, or load weights that were pruned so"
            )
        )
    return ScoredMasks(Criterion("magnitude"), kept)
