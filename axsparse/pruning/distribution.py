"""How a sparsity is spread over tensors, and which tensors a pattern of names matches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from axsparse.runtime.errors import ConfigError

NONE: Mapping[str, float] = MappingProxyType({})


def kept_counts(
    shapes: Mapping[str, tuple[int, ...]],
    sparsity: float,
    *,
    distribution: Literal["uniform", "erk"],
    own: Mapping[str, float] = NONE,
) -> dict[str, int]:
    """How many entries of each tensor stay, in the order of `shapes`.

    The tensors of `own` have the sparsity given there, all others together have `sparsity`:
    `uniform` gives it to each of them, `erk` spreads it by their shapes. Counts are exact (see
    `kept_entries`), for each tensor with `uniform`, for the others together with `erk`. All
    sparsities are in [0, 1).
    """
    assert own.keys() <= shapes.keys()
    assert all(0 <= value < 1 for value in (sparsity, *own.values()))
    kept = {
        name: kept_entries(math.prod(shape), own.get(name, sparsity))
        for name, shape in shapes.items()
    }
    if distribution == "erk":
        others = {name: shape for name, shape in shapes.items() if name not in own}
        total = sum(math.prod(shape) for shape in others.values())
        kept.update(erdos_renyi_kernel(others, kept_entries(total, sparsity)))
    return kept


def kept_entries(numel: int, sparsity: float) -> int:
    """How many of `numel` entries stay: numel − round(sparsity · numel), exactly."""
    return numel - round(sparsity * numel)


def erdos_renyi_kernel(shapes: Mapping[str, tuple[int, ...]], keep: int) -> dict[str, int]:
    """How many entries of each tensor stay if `keep` stay in all, small tensors being denser.

    density = min(1, ε · (sum of the dimensions) / (product of the dimensions))

    with the one ε that keeps `keep` entries (Evci et al. 2020, RigL, section 3). All numbers are
    whole and rounded by Webster's method, so that a smaller `keep` never gives a tensor more
    entries, which pruning in steps relies on. (The method of largest remainders could.) Ties are
    broken by name, so that the order of the tensors does not matter.
    """
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    sums = {name: sum(shape) for name, shape in shapes.items()}
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
    _settle(kept, sums, numel, keep)
    return kept


def _settle(
    kept: dict[str, int], sums: Mapping[str, int], numel: Mapping[str, int], keep: int
) -> None:
    """Add or remove single entries, where that changes proportions least, until `keep` are left."""
    missing = keep - sum(kept.values())
    while missing > 0:
        open_ones = [name for name in sums if kept[name] < numel[name]]
        name = min(open_ones, key=lambda name: (-Fraction(sums[name], 2 * kept[name] + 1), name))
        kept[name] += 1
        missing -= 1
    while missing < 0:
        claims = {name: Fraction(sums[name], 2 * kept[name] - 1) for name in sums if kept[name]}
        weakest = min(claims.values())
        kept[max(name for name, claim in claims.items() if claim == weakest)] -= 1
        missing += 1


def match(
    patterns: Sequence[str],
    names: Sequence[str],
    where: str,
    none: str = "no tensor that could be pruned",
) -> list[str]:
    """The names that match any of the patterns, in the order of `names`.

    A pattern may contain `*`, `?` and `[…]`; case counts, and `*` matches dots, too. `where` is
    the key of the patterns, and their file if known. Raises ConfigError for a pattern that matches
    no name, or as the message says, `none`.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            nearest = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0)) or "none"
            raise ConfigError(f"{where}: {pattern!r} matches {none}; nearest: {nearest}")
        found |= own
    return [name for name in names if name in found]
