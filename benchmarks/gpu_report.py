"""The report of the GPU benchmarks: checks with an outcome each, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

EXIT_FAILED = 1
EXIT_NO_DEVICE = 69

Outcome = Literal["pass", "fail", "skip", "info"]


@dataclass(frozen=True)
class Row:
    """One check."""

    part: str
    check: str
    outcome: Outcome
    """`info` is a figure that nothing is asked of, `skip` a check that could not be made."""
    measured: str = ""
    """Of `skip` and `fail`, the reason."""
    aim: str = ""


def judged(part: str, check: str, measured: str, aim: str, *, good: bool) -> Row:
    return Row(part, check, "pass" if good else "fail", measured, aim)


def table(rows: Iterable[Row]) -> list[str]:
    lines = [f"{'':4}  {'part':10} {'check':46} {'aim':16} measured"]
    lines += [
        f"{row.outcome:4}  {row.part:10} {row.check:46} {row.aim:16} {row.measured}" for row in rows
    ]
    return lines


def count(rows: Sequence[Row]) -> str:
    """ "12 pass, 1 skip"."""
    outcomes = [row.outcome for row in rows]
    names = [name for name in ("pass", "fail", "skip", "info") if name in outcomes]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in names) or "nothing was checked"


def failed(rows: Iterable[Row]) -> bool:
    return any(row.outcome == "fail" for row in rows)


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower, median and upper; of one value thrice that."""
    several = values if len(values) > 1 else [*values, *values]
    return [float(f"{q:.4g}") for q in statistics.quantiles(several, n=4, method="inclusive")]


def spread(values: Sequence[float], unit: str = "") -> str:
    """ "1.23 [1.22, 1.25] s"."""
    low, middle, high = quartiles(values)
    return f"{middle:.4g} [{low:.4g}, {high:.4g}]{f' {unit}' if unit else ''}"


@dataclass
class Report:
    """The JSON of one or several calls on one machine."""

    path: Path | None
    measured_on: dict[str, Any]
    rows: list[Row]
    details: dict[str, Any]
    """By part, what the checks were made from."""

    @staticmethod
    def opened(path: Path | None, measured_on: dict[str, Any]) -> Report:
        """The report of earlier calls at `path`, or an empty one."""
        if path is None or not path.exists():
            return Report(path, measured_on, [], {})
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in found["checks"]]
        return Report(path, {**found["measured on"], **measured_on}, rows, found["details"])

    def put(self, part: str, rows: Sequence[Row], details: Any = None) -> None:
        """Replace what a part says, and save: a call that is killed leaves what was done."""
        self.rows = [row for row in self.rows if row.part != part] + list(rows)
        self.details.pop(part, None)
        if details is not None:
            self.details[part] = details
        self.save()

    def merge(self, other: Report) -> None:
        """Take over what the other says of its parts."""
        self.measured_on |= other.measured_on
        for part in dict.fromkeys(row.part for row in other.rows):
            own = [row for row in other.rows if row.part == part]
            self.put(part, own, other.details.get(part))

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n  ".join(json.dumps(asdict(row), ensure_ascii=False) for row in self.rows)
        details = ",\n  ".join(
            f"{json.dumps(part)}: {json.dumps(value)}" for part, value in self.details.items()
        )
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(
            f'{{"measured on": {json.dumps(self.measured_on)},\n"checks": [\n  {rows}\n],\n'
            f'"details": {{\n  {details}\n}}}}\n',
            encoding="utf-8",
        )
        partial.replace(self.path)
