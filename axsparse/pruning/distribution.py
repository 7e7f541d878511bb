"""How a sparsity is spread over tensors, and which tensors a pattern of names means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

from axsparse.errors import ConfigError
from axsparse.pruning.criteria import kept_entries

NONE: Mapping[str, float] = MappingProxyType({})


def kept_counts(
    shapes: Mapping[str, tuple[int, ...]],
    sparsity: float,
    *,
    distribution: Literal["uniform", "erk"],
    own: Mapping[str, float] = NONE,
) -> dict[str, int]:
    """How many entries of each tensor stay, in the order of `shapes`; sparsities are in [0, 1).

    Tensors of `own` have the sparsity given there, and `sparsity` is that of all others
    together: `uniform` gives it to each of them, `erk` spreads it by their shapes. Both
    keep numel − round(sparsity · numel) entries, exactly: of each tensor, or of all others
    together.
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


def erdos_renyi_kernel(shapes: Mapping[str, tuple[int, ...]], keep: int) -> dict[str, int]:
    """`keep` entries in all, spread so that small and narrow tensors stay denser.

    density = min(1, ε · (sum of the dimensions) / (product of the dimensions))

    with the one ε that keeps `keep` entries (Evci et al. 2020, RigL, section 3). In whole
    numbers throughout: largest remainders round up, among equal ones those whose names sort
    first, so that neither the order of tensors nor rounding errors decide.
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
        # What they do not take raises ε for the others, so a full tensor stays full.
        kept.update((name, numel[name]) for name in full)
        left -= sum(numel[name] for name in full)
        free -= full
    if free:
        kept.update((name, left * sums[name] // weight) for name in free)
        missing = left - sum(kept[name] for name in free)
        by_remainder = sorted(free, key=lambda name: (-(left * sums[name] % weight), name))
        for name in by_remainder[:missing]:
            kept[name] += 1
    return kept


def match(patterns: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """The names that any of some glob patterns means, in their order.

    `*`, `?` and `[…]`; case counts, and `*` crosses dots. `where` is the place of the
    patterns: key, and file if known. Raises ConfigError for a pattern that means no name.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            nearest = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0)) or "none"
            raise ConfigError(
                f"{where}: {pattern!r} matches no tensor that could be pruned; nearest: {nearest}"
            )
        found |= own
    return [name for name in names if name in found]
