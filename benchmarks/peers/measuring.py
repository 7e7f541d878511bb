"""Does runs in interleaved rounds, without the ones in a log; losses have to agree before a time
counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.launch import CHECKOUT, Failure, launch
from peers.workload import DDP, PIPELINING, PLAIN, REFERENCES, Case, Precision, Run, Size

Result = dict[str, Any] | Failure


@dataclass
class Measuring:
    """Runs contenders one after the other."""

    log: RunLog
    timeout: float
    max_foreign: float
    """Share of the machine that others may use before a run is repeated."""
    retries: int

    def result(self, run: Run, number: int) -> Result:
        """The measures of a run in a round, from the log or taken now."""
        known = self.log.get(run, number)
        if known is not None:
            return known
        began = time.monotonic()
        best = launch(run, self.timeout)
        for _ in range(self.retries):
            if isinstance(best, Failure) or best["foreign_share"] <= self.max_foreign:
                break
            again = launch(run, self.timeout)
            if not isinstance(again, Failure):
                best = min(best, again, key=lambda found: found["foreign_share"])
        self.log.put(run, number, best, time.monotonic() - began)
        self._say(run, number, best)
        return best

    def _say(self, run: Run, number: int, result: Result) -> None:
        what = f"round {number + 1} {run.size.name} {run.precision} {run.case.key}"
        if isinstance(result, Failure):
            found = f"failed: {result.reason}"
            print(result.output, file=sys.stderr)
        else:
            busy = result["foreign_share"]
            found = f"{1e3 * result['median_seconds']:.0f} ms a step, others took {busy:.0%}"
        print(f"{what}: {found}", file=sys.stderr, flush=True)


def rounds_of(cases: Sequence[Case], rounds: int) -> list[tuple[Case, int]]:
    """All cases in every round, in the reverse order in every other one.

    What changes slowly, such as the temperature of the machine, then favours nobody.
    """
    return [
        (case, number)
        for number in range(rounds)
        for case in (reversed(cases) if number % 2 else cases)
    ]


@dataclass
class Measured:
    """The results of one size and precision, by case and round."""

    size: Size
    precision: Precision
    rows: dict[Case, dict[int, Result]] = field(default_factory=dict)

    def good(self, case: Case) -> dict[int, dict[str, Any]]:
        rows = self.rows.get(case, {})
        return {n: row for n, row in rows.items() if not isinstance(row, Failure)}

    def seconds(self, case: Case) -> Mapping[int, float]:
        """Median seconds of a step, by round."""
        return {number: row["median_seconds"] for number, row in self.good(case).items()}


MEASURING = ("workload.py", "gpt.py", "adamw.py", "rank.py", "launch.py")


def code_digest(versions: str) -> str:
    """A digest of all that a measured figure depends on: our package, what measures, versions."""
    digest = hashlib.blake2b(versions.encode(), digest_size=8)
    peers = Path(__file__).parent
    files = [
        *sorted((CHECKOUT / "axsparse").rglob("*.py")),
        *(peers / name for name in MEASURING),
        *sorted((peers / "contenders").glob("*.py")),
    ]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass
class RunLog:
    """Runs by what was run, with which code, and the number of the round."""

    path: Path
    code: str
    _found: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for row in self._rows():
            if row["code"] == self.code:
                self._found[row["run"], row["round"]] = row

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            # The last line is cut off if the comparison was killed while it wrote.
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def get(self, run: Run, number: int) -> dict[str, Any] | Failure | None:
        """The result of a run in a round; None if it is still to be done."""
        row = self._found.get((run.text(), number))
        if row is None:
            return None
        return Failure(**row["failure"]) if "failure" in row else row["result"]

    def put(self, run: Run, number: int, result: dict[str, Any] | Failure, seconds: float) -> None:
        row: dict[str, Any] = {"code": self.code, "round": number, "run": run.text()}
        row["wall_seconds"] = round(seconds, 1)
        if isinstance(result, Failure):
            row["failure"] = {"reason": result.reason, "output": result.output}
        else:
            row["result"] = result
        with self.path.open("a", encoding="utf-8") as file:
            # A line that was cut off must not swallow the next one.
            file.write(f"\n{json.dumps(row)}\n")
        self._found[run.text(), number] = row


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
            wrong[case] = failures[0].reason
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
