"""Step times of all contenders in interleaved rounds; losses have to agree before a time counts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from peers.launch import Failure
from peers.measuring import Measured, Measuring, rounds_of
from peers.ratios import Spread, agrees, difference, digits, ratio_of, spread
from peers.workload import DDP, PIPELINING, PLAIN, REFERENCES, Case, Precision, Run, Size

LAYOUT_REFERENCE = {"1x1": PLAIN.name, "1x2": DDP.name}
"""The dense peer of a layout that its other contenders are compared with; others: 1F1B."""


def measure_times(
    measuring: Measuring,
    size: Size,
    precision: Precision,
    cases: Sequence[Case],
    *,
    rounds: int,
    steps: int,
    warmup: int,
) -> Measured:
    """Every case in every round."""
    found = Measured(size, precision)
    for case, number in rounds_of(cases, rounds):
        result = measuring.result(Run(case, size, precision, steps, warmup), number)
        found.rows.setdefault(case, {})[number] = result
    return found


def sum_squares(found: Measured) -> dict[Case, str]:
    """The reason why the times of a case do not count, for each such case.

    Raises LookupError if a reference has not run: then no loss can be compared.
    """
    references = {masked: _reference(found, key) for masked, key in REFERENCES.items()}
    wrong = {}
    apart = difference(references[True]["losses"], references[False]["losses"])
    if agrees(apart, found.precision):
        raise LookupError("masked and dense losses are so close that losses cannot judge")
    for case, rows in found.rows.items():
        failures = [row for row in rows.values() if isinstance(row, Failure)]
        if failures:
            wrong[case] = "no memory" if failures[0].is_memory else failures[0].reason
            continue
        reference = references[case.is_masked]
        for row in rows.values():
            if row["tokens"] != reference["tokens"]:  # type: ignore[index]
                wrong[case] = "read other tokens"
        if case not in wrong and not case.is_floor:
            worst = loss_difference(found, case)
            if not agrees(worst, found.precision):
                wrong[case] = f"losses differ: {digits(worst)} digits"
    return wrong


def loss_difference(found: Measured, case: Case) -> float:
    """The worst over steps and rounds."""
    reference = _reference(found, REFERENCES[case.is_masked])
    return max(difference(row["losses"], reference["losses"]) for row in found.good(case).values())


def _reference(found: Measured, key: str) -> dict[str, Any]:
    for case in found.rows:
        if case.key == key and found.good(case):
            return found.good(case)[min(found.good(case))]
    raise LookupError(f"{key} has not run, and its losses judge those of the others")


def fastest_variants(found: Measured, wrong: Mapping[Case, str]) -> dict[str, Case]:
    """The variant of each contender with the least median time, by `Case.family`."""
    best: dict[str, Case] = {}
    for case in found.rows:
        if case in wrong or not found.good(case):
            continue
        old = best.get(case.family)
        if old is None or _median(found, case) < _median(found, old):
            best[case.family] = case
    return best


def _median(found: Measured, case: Case) -> float:
    return statistics.median(found.seconds(case).values())


def time_rows(found: Measured) -> list[dict[str, Any]]:
    """The reported row of each case: times, ratios, agreement of losses, memory, phases."""
    wrong = sum_squares(found)
    best = fastest_variants(found, wrong)
    rows = []
    for case in found.rows:
        row: dict[str, Any] = {
            "contender": case.name,
            "variant": case.variant,
            "layout": case.layout,
            "masking": case.masking,
        }
        rows.append(row)
        if case in wrong:
            row["does not count"] = wrong[case]
            continue
        runs = list(found.good(case).values())
        seconds = found.seconds(case)
        base = best.get(f"{LAYOUT_REFERENCE.get(case.layout, PIPELINING.name)} {case.layout}")
        row |= {
            "is_fastest_variant": best[case.family] == case,
            "milliseconds": _shown(spread([1e3 * value for value in seconds.values()]), 1),
            "to_plain": _ratio(found, case, best.get(PLAIN.family)),
            "to_dense_peer_of_layout": _ratio(found, case, base),
            "losses_agree_to": None if case.is_floor else digits(loss_difference(found, case)),
            "cpu_seconds_a_step": round(statistics.median(r["cpu_seconds"] for r in runs), 3),
            "foreign_share": max(run["foreign_share"] for run in runs),
            "peak_megabytes_above_libraries": [
                round(statistics.median(column) / 1e6, 1)
                for column in zip(*(r["peak_bytes_above_libraries"] for r in runs), strict=True)
            ],
        }
    return rows


def speedups(found: Measured) -> list[dict[str, Any]]:
    """How many times as fast as each peer, at its best setting, ours is in the same layout."""
    best = fastest_variants(found, sum_squares(found))
    pairs = [
        (own, peer)
        for own in best.values()
        for peer in best.values()
        if own.framework == "axsparse" != peer.framework and own.layout == peer.layout
    ]
    return [
        {
            "ours": own.name,
            "peer": peer.name,
            "setting": peer.variant,
            "layout": own.layout,
            "times_as_fast": _ratio(found, peer, own),
        }
        for own, peer in pairs
    ]


def _ratio(found: Measured, own: Case, other: Case | None) -> dict[str, float] | None:
    if other is None:
        return None
    ratio = ratio_of(found.seconds(own), found.seconds(other))
    return None if ratio is None else _shown(ratio, 4)


def _shown(figure: Spread, digits_shown: int) -> dict[str, float]:
    return {name: round(value, digits_shown) for name, value in vars(figure).items()}
