"""Which tensors of a model are pruned, and how many of their entries are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from axsparse.config.schema import Config, PruningConfig, parse_pattern, prunes
from axsparse.models.model_profile import ModelProfile, ParameterInfo, match, named_value
from axsparse.models.start_weights import some_of
from axsparse.pruning.mask_file import MaskFile, open_masks
from axsparse.runtime.errors import ConfigError
from axsparse.samo.masks import Shape

FROM_START = frozenset(("magnitude", "random", "custom", "zeros", "wanda", "sparsegpt"))
"""Methods whose first masks need nothing but the initial weights, and perhaps samples."""
NOTHING_PRUNABLE = "no tensor that could be pruned"
NOT_SAVED = "not pruned in the checkpoint"

OWN_FORM = "pattern=sparsity with a sparsity from 0 to below 1; write it like block0.*=0.5"


@dataclass(frozen=True)
class Targets:
    """The tensors to prune and their final sparsities."""

    shapes: Mapping[str, Shape]
    """The tensors by global name, in model order; a tied weight stands here once."""
    sparsity: float
    """Fraction that is removed of all tensors that are not in `own`."""
    distribution: Literal["uniform", "erk", "global"]
    own: Mapping[str, float]
    """The sparsities of tensors that `pruning.layers` names."""
    mask_file: MaskFile | None = None
    """The file whose masks are used from the start, and which names the tensors; None without, and
    where a checkpoint has its masks."""
    given: Mapping[str, int] | None = None
    """Kept entries of each tensor where `pruning.mask` gives the masks; None without."""
    input_dims: Mapping[str, int] = field(default_factory=dict)
    """`ParameterInfo.input_dim` of stacks and of transposed matrices."""
    count: Callable[[int, int, float], int] | None = None
    """The count of `COUNTS` by which a method keeps entries of each matrix; None keeps as many as
    `kept_counts` says."""

    def kept(self, at: Callable[[float], float] = lambda final: final) -> dict[str, int]:
        """How many entries each tensor keeps; `at` maps a final sparsity to the present one.

        Given masks say that by themselves. A global distribution needs the weights to say it;
        here it counts as uniform.
        """
        if self.given is not None:
            return dict(self.given)
        if self.count is not None:
            kept = {}
            for name in self.shapes:
                number, (outputs, *inputs) = self.matrices(name)
                sparsity = at(self.own.get(name, self.sparsity))
                kept[name] = number * self.count(outputs, math.prod(inputs), sparsity)
            return kept
        return kept_counts(
            self.shapes,
            at(self.sparsity),
            distribution="uniform" if self.distribution == "global" else self.distribution,
            own={name: at(sparsity) for name, sparsity in self.own.items()},
            stacks=self.stacks,
        )

    @property
    def stacks(self) -> list[str]:
        """The tensors that are a matrix for each expert, of which each is pruned by itself."""
        return [name for name in self.input_dims if len(self.shapes[name]) == 3]

    def matrices(self, name: str) -> tuple[int, Shape]:
        """The number of matrices in a tensor that are pruned each by itself, and their shape; where
        `input_dims` has it (outputs, inputs)."""
        shape, input_dim = self.shapes[name], self.input_dims.get(name)
        return ParameterInfo(name, tuple(shape), trained=True, input_dim=input_dim).matrices

    @property
    def common(self) -> Sequence[str]:
        """The tensors that share one threshold."""
        if self.distribution != "global":
            return []
        return [name for name in self.shapes if name not in self.own]


def what_is_pruned(
    config: Config, profiled: ModelProfile, saved: Mapping[str, int] | None = None
) -> Targets | None:
    """The tensors that a run prunes, with the mask file of the settings, if there is one; None for
    dense training. `saved` has the kept entries in the checkpoint that the run is resumed from,
    whose masks stay, so that the file is not read.

    Raises ConfigError where the settings or the masks do not fit the model, and what `open_masks`
    raises.
    """
    pruning = config.pruning
    targets = find_targets(profiled, pruning, config.where) if config.samo.enabled else None
    if targets is None or not prunes(pruning):
        return None
    if pruning.mask is None:
        return targets
    given = replace(targets, own={}, input_dims={})
    if saved is not None:
        found = [name for name in profiled.counted if name in saved]
        return replace(given, shapes={name: profiled.shapes[name] for name in found}, given=saved)
    masks = open_masks(pruning.mask)
    return replace(given, shapes=masks.targets(profiled), mask_file=masks, given=masks.kept)


def find_targets(
    profiled: ModelProfile, pruning: PruningConfig, where: Callable[[str], str] = str
) -> Targets:
    """The tensors of a model that the settings prune; ConfigError where the two do not fit, in
    which `where` is as `Config.where`.

    Those are the trained weights of the linear, convolution, recurrent and attention modules of
    the blocks (with `include: all`, the trained matrices of every layer) that `pruning.exclude`
    does not name, and other trained matrices that `pruning.layers` names.
    """
    matrices = {
        parameter.name: (parameter, layer.kind)
        for layer in profiled.layers
        for parameter in layer.parameters
        if parameter.trained and parameter.name not in profiled.ties and len(parameter.shape) >= 2
    }
    exclude, layers = (where(f"pruning.{key}") for key in ("exclude", "layers"))
    named = match(pruning.exclude, [*matrices, *profiled.ties], exclude, NOTHING_PRUNABLE)
    excluded = {profiled.ties.get(name, name) for name in named}
    candidates = [name for name in matrices if name not in excluded]
    usual = [
        name
        for name in candidates
        if pruning.include == "all"
        or (matrices[name][1] == "block" and matrices[name][0].multiplies)
    ]
    own = {}
    for entry in pruning.layers:
        pattern, own_sparsity = named_value(layers, entry, 1.0, OWN_FORM)
        # A pattern of names that are pruned anyway adds no others.
        among = usual if any(fnmatchcase(name, pattern) for name in usual) else candidates
        names = match([pattern], among, layers, NOTHING_PRUNABLE)
        own.update(dict.fromkeys(names, own_sparsity))
    shapes = {
        name: tuple(matrices[name][0].shape) for name in candidates if name in own or name in usual
    }
    if not shapes and prunes(pruning) and pruning.mask is None:
        why = _none_left(profiled, pruning, where, excluded)
        raise ConfigError(f"{why} set samo.enabled=false")
    found = {name: matrices[name][0].input_dim for name in shapes}
    input_dims = {name: dim for name, dim in found.items() if dim is not None}
    sparsity, count = pruning.sparsity, COUNTS.get(pruning.method)
    if pruning.pattern is not None:
        n, m = parse_pattern(pruning.pattern)
        sparsity, count = 1 - n / m, None
        turned = [name for name in shapes if matrices[name][0].is_transposed]
        check_pattern(shapes, n, m, input_dims, turned)
    return Targets(shapes, sparsity, pruning.distribution, own, input_dims=input_dims, count=count)


def _none_left(
    profiled: ModelProfile,
    pruning: PruningConfig,
    where: Callable[[str], str],
    excluded: Collection[str],
) -> str:
    """Why nothing is pruned, and what to do, up to a last way."""
    include = where("pruning.include")
    blocks = [layer for layer in profiled.layers if layer.kind == "block"]
    has_matrices = any(
        len(p.shape) >= 2 and p.trained for layer in profiled.layers for p in layer.parameters
    )
    if excluded:
        return f"{where('pruning.exclude')}: no tensor is left to prune; leave some in, or"
    choose_all = ", choose all" * has_matrices
    if any(p.multiplies and not p.trained for block in blocks for p in block.parameters):
        return (
            f"{include}: blocks, but all weights of the blocks are frozen, and trained ones alone "
            f"are pruned; train some (requires_grad_){choose_all}, or"
        )
    if not has_matrices:
        return f"{include}: no matrix of this model is trained;"
    may_name = pruning.pattern is None and pruning.method != "zeros"
    return (
        f"{include}: blocks, but no block of this model has a weight of a linear, convolution, "
        f"recurrent or attention module; choose all{', name matrices in pruning.layers' * may_name}"
        ", or"
    )


def of_all_numbers(name: str) -> str:
    """The pattern of a tensor's name and of those that differ in numbers alone."""
    return re.sub(r"\d+", "*", name)


def to_exclude(
    names: Sequence[str],
    pruned: Collection[str],
    fit: Collection[str],
    otherwise: str,
    own: Collection[str] = (),
) -> str:
    """The suggestion that leaves out some of the pruned tensors, by patterns that match none that
    is `fit`; only what helps `otherwise` if no other one is. `pruning.layers` names those in `own`.
    """
    if not fit:
        return otherwise
    found: dict[str, None] = {}
    for name in names:
        forms = (of_all_numbers(name), re.sub(r"\d+", "*", name, count=1))
        alike = (form for form in forms if not any(fnmatchcase(one, form) for one in fit))
        form = next(alike, name)
        found[form if sum(fnmatchcase(one, form) for one in pruned) > 1 else name] = None
    both = " instead of pruning.layers" if {*own}.intersection(names) else ""
    return f"add {', '.join(found)} to pruning.exclude{both}, or {otherwise}"


def left_dense(
    profiled: ModelProfile, targets: Targets, pruning: PruningConfig
) -> dict[str, list[ParameterInfo]]:
    """The trained parameters that stay dense, by the reason why."""
    dense: dict[str, list[ParameterInfo]] = {}
    shared = {first: second for second, first in profiled.ties.items()}
    for layer in profiled.layers:
        for parameter in layer.parameters:
            name = parameter.name
            if not parameter.trained or name in profiled.ties or name in targets.shapes:
                continue
            if len(parameter.shape) < 2:
                why = "vectors"
            elif pruning.mask is not None:
                why = NOT_SAVED if targets.mask_file is None else "not in the mask file"
            elif any(
                fnmatchcase(one, pattern)
                for one in (name, shared.get(name, name))
                for pattern in pruning.exclude
            ):
                why = "named in pruning.exclude"
            elif layer.kind != "block":
                why = f"in a layer of kind {layer.kind}; pruning.include: all prunes them"
            else:
                why = (
                    "the weight of no linear, convolution, recurrent or attention module; "
                    "pruning.layers may name them"
                )
            dense.setdefault(why, []).append(parameter)
    return dense


def pruning_lines(
    profiled: ModelProfile,
    targets: Targets,
    pruning: PruningConfig,
    saved: Mapping[str, int] | None = None,
) -> list[str]:
    """The final pruned tensors and the ones that stay dense, for the start of a run. `saved` has
    the kept entries of a checkpoint whose masks stay, which lacks weights that are thawed now."""
    kept = targets.kept() if saved is None else saved
    kept = {name: kept[name] for name in targets.shapes if name in kept}
    numel = sum(math.prod(targets.shapes[name]) for name in kept)
    lines = [
        f"pruned: {len(kept)} tensors, {numel:,} of {profiled.num_params:,} entries, of "
        f"which {sum(kept.values()):,} stay"
    ]
    whole = [name for name in targets.shapes if name not in kept]
    parts = [f"{some_of(whole)} ({NOT_SAVED})"] if whole else []
    for why, parameters in left_dense(profiled, targets, pruning).items():
        if why == "vectors":
            parts.append(f"{len(parameters)} vectors")
            continue
        names = [parameter.name for parameter in parameters]
        parts.append(f"{some_of(names)} ({why})")
    return [*lines, f"dense: {' · '.join(parts)}"] if parts else lines


def starts_pruned(config: Config, targets: Targets | None) -> bool:
    """Whether state is built compressed; otherwise it is dense until the first pruning."""
    pruning = config.pruning
    at_start = pruning.at_step == 0 and pruning.method in FROM_START
    has_masks = at_start or initial_share(pruning) > 0
    return targets is not None and (targets.given is not None or has_masks)


def kept_at_start(config: Config, targets: Targets | None) -> Mapping[str, int]:
    """Kept entries of the tensors that are built compressed, by name; empty if none is."""
    if targets is None or not starts_pruned(config, targets):
        return {}
    share = initial_share(config.pruning) or 1.0
    return targets.kept(lambda final: share * final)


def initial_share(pruning: PruningConfig) -> float:
    """The share of its final sparsity that each tensor has before gradual pruning."""
    if pruning.initial_sparsity == 0 or pruning.mask is not None:
        return 0.0
    return pruning.initial_sparsity / pruning.sparsity


CHUNK = 131_072
"""Entries that are sorted at a time, in full rows; this bounds temporaries to some 5 MB."""


def kept_counts(
    shapes: Mapping[str, tuple[int, ...]],
    sparsity: float,
    *,
    distribution: Literal["uniform", "erk"],
    own: Mapping[str, float] = {},
    stacks: Collection[str] = (),
) -> dict[str, int]:
    """How many entries of each tensor stay, in the order of `shapes`.

    The tensors of `own` have the sparsity given there, all others together have `sparsity`:
    `uniform` gives it to each of them, `erk` spreads it by their shapes. Counts are exact (see
    `kept_entries`), for each tensor with `uniform`, for the others together with `erk`. Of the
    tensors in `stacks` each matrix counts by itself. All sparsities are in [0, 1).
    """
    assert own.keys() <= shapes.keys()
    assert all(0 <= value < 1 for value in (sparsity, *own.values()))
    kept = {}
    for name, shape in shapes.items():
        matrices = shape[0] if name in stacks else 1
        one = kept_entries(math.prod(shape) // matrices, own.get(name, sparsity))
        kept[name] = matrices * one
    if distribution == "erk":
        others = {name: shape for name, shape in shapes.items() if name not in own}
        total = sum(math.prod(shape) for shape in others.values())
        kept.update(erdos_renyi_kernel(others, kept_entries(total, sparsity), stacks))
    return kept


def kept_entries(numel: int, sparsity: float) -> int:
    """How many of `numel` entries stay: numel − round(sparsity · numel), exactly."""
    return numel - round(sparsity * numel)


def erdos_renyi_kernel(
    shapes: Mapping[str, tuple[int, ...]], keep: int, stacks: Collection[str] = ()
) -> dict[str, int]:
    """How many entries of each tensor stay if `keep` stay in all, small tensors being denser.

    density = min(1, ε · (sum of the dimensions) / (product of the dimensions))

    with the one ε that keeps `keep` entries (Evci et al. 2020, RigL, section 3); `stacks` are as
    dense as one of their matrices. All numbers are rounded to integers by Webster's method, so that
    a smaller `keep` never gives a tensor more entries, which pruning in steps relies on. (The
    method of largest remainders could.) Ties are broken by name, so that the order of the tensors
    does not matter.
    """
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    sums = {
        name: shape[0] * sum(shape[1:]) if name in stacks else sum(shape)
        for name, shape in shapes.items()
    }
    assert 0 <= keep <= sum(numel.values())
    kept: dict[str, int] = {}
    free, left = set(shapes), keep
    while free:
        weight = sum(sums[name] for name in free)
        full = {name for name in free if left * sums[name] >= numel[name] * weight}
        if not full:
            break
        # Full tensors take less than their share, which raises ε for the others; so a tensor
        # that is full once stays full.
        kept.update((name, numel[name]) for name in full)
        left -= sum(numel[name] for name in full)
        free -= full
    for name in free:  # rounds to the nearest number, and halves up
        kept[name] = (2 * left * sums[name] + weight) // (2 * weight)
    # Single entries are added or removed where that changes proportions least.
    missing = keep - sum(kept.values())
    for _ in range(missing):
        claims = {n: Fraction(sums[n], 2 * kept[n] + 1) for n in sums if kept[n] < numel[n]}
        kept[min(claims, key=lambda name: (-claims[name], name))] += 1
    for _ in range(-missing):
        claims = {n: Fraction(sums[n], 2 * kept[n] - 1) for n in sums if kept[n]}
        weakest = min(claims.values())
        kept[max(name for name, claim in claims.items() if claim == weakest)] -= 1
    return kept


# -- by inputs, in rows or blocks of a matrix ---------------------------------------------

BLOCK = 128
"""Columns that SparseGPT prunes at a time."""


def removed_of_row(inputs: int, sparsity: float) -> int:
    """How many entries of a row Wanda removes."""
    return int(inputs * sparsity)


def removed_of_block(entries: int, sparsity: float) -> int:
    """How many entries of a block SparseGPT removes: as published, one more than the fraction."""
    return min(int(entries * sparsity) + 1, entries) if sparsity else 0


def _kept_by_rows(outputs: int, inputs: int, sparsity: float) -> int:
    return outputs * (inputs - removed_of_row(inputs, sparsity))


def _kept_by_blocks(outputs: int, inputs: int, sparsity: float) -> int:
    widths = (min(BLOCK, inputs - start) for start in range(0, inputs, BLOCK))
    return outputs * inputs - sum(removed_of_block(outputs * width, sparsity) for width in widths)


COUNTS = {"wanda": _kept_by_rows, "sparsegpt": _kept_by_blocks}
"""How many entries of a matrix stay, by its outputs, its inputs and a sparsity, under the methods
that calibration samples decide."""


# -- N:M, as sparse tensor cores need it (2:4) ------------------------------------------


def check_pattern(
    shapes: Mapping[str, tuple[int, ...]],
    n: int,
    m: int,
    input_dims: Mapping[str, int],
    turned: Sequence[str] = (),
) -> None:
    """ConfigError unless `m` divides the inputs of each tensor, by default its dimension 1, or if
    any is `turned`, of a transposed convolution."""
    otherwise = "give pruning.sparsity instead"
    if turned:
        raise ConfigError(
            f"pruning.pattern: {n}:{m} runs along the inputs of a matrix, and {some_of(turned)} of "
            "a transposed convolution has its outputs there; "
            f"{to_exclude(turned, shapes, shapes.keys() - {*turned}, otherwise)}"
        )
    inputs = {name: shape[input_dims.get(name, 1)] for name, shape in shapes.items()}
    if odd := [name for name, size in inputs.items() if size % m]:
        sizes = some_of([f"{name} ({inputs[name]} of {tuple(shapes[name])})" for name in odd])
        suggestion = to_exclude(odd, shapes, shapes.keys() - odd, otherwise)
        raise ConfigError(
            f"pruning.pattern: {n}:{m} runs along the inputs of a matrix, and {m} does not divide "
            f"those of {sizes}; {suggestion}"
        )


def n_of_m(score: Tensor, n: int, m: int, inputs: int = 1) -> Tensor:
    """The bool mask, in the shape of `score`, of the n largest of every m consecutive inputs.

    Inputs are dimension 1 of a Linear (out, in) and of a Conv (out, in, kh, kw), where each place
    of the kernel counts by itself, and 2 of experts (experts, out, in). Among equal scores, lower
    positions stay. `score` has no NaN, and m divides its dimension `inputs`.
    """
    mask = torch.zeros(score.shape, dtype=torch.bool)
    grouped_mask = _groups(mask, m, inputs)
    step = max(1, CHUNK * len(grouped_mask) // mask.numel())
    parts = _groups(score, m, inputs).split(step)
    for part, kept in zip(parts, grouped_mask.split(step), strict=True):
        order = part.sort(dim=2, descending=True, stable=True).indices
        kept.scatter_(2, order[:, :, :n], True)
    return mask


def _groups(tensor: Tensor, m: int, inputs: int) -> Tensor:
    """A tensor as (rows, groups, m, places of a kernel)."""
    numel = tensor.shape[inputs]
    assert numel % m == 0, "check_pattern was not asked"
    rows = math.prod(tensor.shape[:inputs])
    return tensor.reshape(rows, numel // m, m, -1)
