"""Ratios within rounds, and whether losses agree: all that decides about a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.workload import Precision

LOSS_TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-5, "bf16": 1e-3}
"""Largest relative difference from plain torch in the loss of any step.

fp32: other orders of the same sums; 6e-8 is measured over six steps. bf16: gradients are added
up in bf16 by some and in fp32 by others; 3e-5 is measured over four steps, and grows with them.
That masked and dense losses differ by more is checked as well.
"""


@dataclass(frozen=True)
class Spread:
    """A figure over rounds."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Raises StatisticsError if there are none."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio_of(own: Mapping[int, float], other: Mapping[int, float]) -> Spread | None:
    """`own` over `other`, both seconds by round, within each round that has both; None if none."""
    common = sorted(own.keys() & other.keys())
    return spread([own[number] / other[number] for number in common]) if common else None


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of the losses of a step; infinite for one that is no number.

    Raises ValueError for another number of steps.
    """
    pairs = zip(losses, reference, strict=True)
    worst = max(abs(loss - other) / abs(other) for loss, other in pairs)
    return worst if all(map(math.isfinite, (*losses, worst))) else math.inf


def digits(found: float) -> str:
    """A relative difference as the number of decimal digits that agree."""
    if found == 0:
        return "exact"
    return f"{-math.log10(found):.1f}" if math.isfinite(found) else "none"


def agrees(found: float, precision: Precision) -> bool:
    return found <= LOSS_TOLERANCE[precision]
