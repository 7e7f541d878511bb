"""How many entries of each tensor stay: shares of a sparsity, or N of every M neighbours (N:M)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from axsparse.runtime.errors import ConfigError

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


# -- N:M, as sparse tensor cores need it (2:4) ------------------------------------------


def parse_pattern(text: str) -> tuple[int, int]:
    """The two numbers of a pattern such as "2:4"; ConfigError for any other text."""
    numbers = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    n, m = map(int, numbers.groups()) if numbers else (0, 0)
    if not 0 < n < m:
        raise ConfigError(
            f"pruning.pattern: {text!r} is not N:M with 0 < N < M; write 2:4 to keep two of "
            "every four"
        )
    return n, m


def check_pattern(name: str, shape: tuple[int, ...], n: int, m: int, inputs: int = 1) -> None:
    """ConfigError unless `m` divides dimension `inputs` of the tensor, its inputs."""
    if shape[inputs] % m:
        raise ConfigError(
            f"{name}: {n}:{m} runs along dimension {inputs} of its shape {shape}, which is not a "
            f"multiple of {m}; name it in pruning.exclude"
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


def crowded_groups(stays: Tensor, n: int, m: int, inputs: int = 1) -> int:
    """How many groups of m consecutive inputs have more than n True entries.

    `stays` is bool in the shape of a tensor, as in `n_of_m`.
    """
    return int((_groups(stays, m, inputs).sum(2) > n).sum())


def _groups(tensor: Tensor, m: int, inputs: int) -> Tensor:
    """A tensor as (rows, groups, m, places of a kernel)."""
    numel = tensor.shape[inputs]
    assert numel % m == 0, "check_pattern was not asked"
    rows = math.prod(tensor.shape[:inputs])
    return tensor.reshape(rows, numel // m, m, -1)
