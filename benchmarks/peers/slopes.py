"""Peak memory in bytes a parameter, all ranks together: the slope between two depths.

Libraries, activations and buffers are the same at both depths but for what eight more blocks
need, so that they cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.launch import Failure
from peers.measuring import Measuring
from peers.ratios import slope, spread
from peers.workload import Case, Precision, Run, Size

STEPS, WARMUP = 2, 1


def slope_runs(
    cases: Sequence[Case], pair: tuple[Size, Size], precision: Precision
) -> list[tuple[Run, int]]:
    return [(Run(case, size, precision, STEPS, WARMUP), 0) for case in cases for size in pair]


def measure_slopes(
    measuring: Measuring,
    cases: Sequence[Case],
    pair: tuple[Size, Size],
    precision: Precision,
    rounds: int,
) -> list[dict[str, Any]]:
    """One row a case; the least memory of its variants is what a contender needs."""
    rows = []
    shallow, deep = pair
    for case in cases:
        row: dict[str, Any] = {
            "contender": case.name,
            "variant": case.variant,
            "layout": case.layout,
            "precision": precision,
        }
        rows.append(row)
        found = []
        for number in range(rounds):
            results = [
                measuring.result(Run(case, size, precision, STEPS, WARMUP), number)
                for size in (shallow, deep)
            ]
            failed = [result for result in results if isinstance(result, Failure)]
            if failed:
                row["failed"] = failed[0].reason
                break
            peaks = [r["peak_bytes"] for r in results if not isinstance(r, Failure)]
            found.append(slope(peaks[0], peaks[1], (shallow.parameters, deep.parameters)))
        else:
            row["bytes_a_parameter"] = {n: round(v, 2) for n, v in vars(spread(found)).items()}
    return rows
