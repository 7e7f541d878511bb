"""The data of a report on a run. Reads metrics.jsonl, also of a run that still runs or was killed.

`docs/reference/metrics.md` says what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.observe.charts import Bars
from axsparse.observe.trace_file import Span
from axsparse.runtime.errors import DataError, MissingInputError, reading

Value = float | str | None
Record = Mapping[str, Value]
"""One line; truth values are 0 and 1, and None stands for values that are no text and no finite
number."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run by their kind, each kind in order of steps."""

    steps: Sequence[Record]
    evaluations: Sequence[Record]
    masks: Sequence[Record]
    plans: Sequence[Record]
    is_cut: bool
    """Whether the last line was only half there, and is left out."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The data of a report on one run; missing data is empty."""

    name: str
    records: RunRecords
    config_text: str = ""
    settings: Mapping[str, str]
    """Values by dotted key."""
    versions: Mapping[str, str]
    trace: str = ""
    """The name of the file that `spans` are from."""
    spans: Sequence[Span] = ()
    sparsity: Bars | None = None
    """The removed share of each layer."""
    notes: Sequence[str] = ()


def number(record: Record, name: str) -> float | None:
    """A number of a record; None if it has none of this name."""
    value = record.get(name)
    return None if isinstance(value, str) else value


def step_of(record: Record) -> float:
    """The steps that were done when a record was written; the record of a step counts that step."""
    return number(record, "step") or 0.0


def read_records(path: Path) -> RunRecords:
    """The records of a metrics.jsonl.

    Raises MissingInputError if it cannot be read or has no record yet, DataError if a line
    other than the last is no record.
    """
    with reading(f"{path}:", "name the directory of a run"):
        lines = path.read_bytes().split(b"\n")
    kinds: dict[str, list[Record]] = {kind: [] for kind in _KEYS}
    is_cut = False
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
        except ValueError as wrong:
            if at == len(lines):  # No line break follows it: it was not written to its end.
                is_cut = True
                break
            raise DataError(
                f"{path}:{at}: is no record of a run ({wrong}); restore the file, or remove the "
                "line"
            ) from None
        for kind, key in _KEYS.items():
            if key in record:
                kinds[kind].append(record)
                break
    if not any(kinds.values()):
        raise MissingInputError(
            f"{path}: has no record yet; wait for the first step, or name another run"
        )
    return RunRecords(
        **{kind: sorted(of_kind, key=step_of) for kind, of_kind in kinds.items()}, is_cut=is_cut
    )


_KEYS = {
    "steps": "loss",
    "evaluations": "eval_loss",
    "masks": "masks",
    "plans": "predicted_peak_memory_bytes",
}
"""A key that only this kind of record has."""


def _record(line: bytes) -> Record:
    """The record of a line; ValueError if it is none."""
    try:
        fields = json.loads(line, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    record = {name: _value(value) for name, value in fields.items()}
    if not isinstance(record.get("step"), float):
        raise ValueError("without a step")
    return record


def _value(value: object) -> Value:
    if value is None or isinstance(value, str):
        return value
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
