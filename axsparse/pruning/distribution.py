"""How a sparsity is spread over tensors, and which tensors a pattern of names means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from axsparse.pruning.criteria import kept_entries
from axsparse.runtime.errors import ConfigError

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
    numbers throughout, rounded by Webster's method: fewer entries in all never mean more of
    one tensor, which pruning in steps relies on (largest remainders would not do). Among
    equals names decide, so that neither the order of tensors nor rounding errors do.
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
    for name in free:  # to the nearest: halves up
        kept[name] = (2 * left * sums[name] + weight) // (2 * weight)
    _settle(kept, sums, numel, keep)
    return kept


def _settle(
    kept: dict[str, int], sums: Mapping[str, int], numel: Mapping[str, int], keep: int
) -> None:
    """Add and take away single entries, where that bends proportions least, until the sum fits."""
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
