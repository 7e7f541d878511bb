"""Traces of steps in Chrome's format, which Perfetto opens: one schema, simulated or real.

Every event is a complete one ("ph": "X"): `cat` is a phase of `observe.phases`, `name` the
action it belongs to ("F3") or the phase, `pid` the replica, `tid` the stage, `ts` and `dur`
microseconds, `args.step` the step. A rank's events never overlap, so that those of a phase
add up to its seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axsparse.observe.phases import PHASES
from axsparse.runtime.errors import DataError, MissingInputError, OutputError

MICROSECONDS = 1e6
HEAD, BETWEEN = '{"traceEvents": [\n', ",\n"
"""A file is `HEAD`, the parts of its ranks with `BETWEEN` between them, and `tail`."""


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time."""

    step: int
    replica: int
    stage: int
    phase: str
    name: str
    """An action, such as "F3", or the phase."""
    begin: float
    """Seconds."""
    end: float


def to_json(spans: Iterable[Span], source: str) -> str:
    """The text of a trace; `source` says what it is of."""
    ranks: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        ranks.setdefault((span.replica, span.stage), []).append(span)
    parts = (part(*rank, found) for rank, found in sorted(ranks.items()))
    return f"{HEAD}{BETWEEN.join(parts)}{tail(source)}"


def part(replica: int, stage: int, spans: Iterable[Span]) -> str:
    """The events of one rank, of which `BETWEEN` makes a whole."""
    events = [_label("thread_name", replica, stage, f"stage {stage}")]
    if stage == 0:
        events.insert(0, _label("process_name", replica, 0, f"replica {replica}"))
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.phase,
            "pid": replica,
            "tid": stage,
            "ts": MICROSECONDS * span.begin,
            "dur": MICROSECONDS * (span.end - span.begin),
            "args": {"step": span.step},
        }
        for span in sorted(spans, key=lambda span: span.begin)
    ]
    return BETWEEN.join(map(json.dumps, events))


def tail(source: str) -> str:
    """What comes after the events."""
    return f'\n], "otherData": {json.dumps({"source": source})}}}'


def _label(kind: str, replica: int, stage: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": replica, "tid": stage, "args": {"name": name}}


def from_json(text: str, where: str) -> list[Span]:
    """The spans of a trace; DataError if it is none of ours."""
    try:
        return [
            Span(
                step=int(event["args"]["step"]),
                replica=int(event["pid"]),
                stage=int(event["tid"]),
                phase=_phase(event["cat"]),
                name=str(event["name"]),
                begin=event["ts"] / MICROSECONDS,
                end=(event["ts"] + event["dur"]) / MICROSECONDS,
            )
            for event in json.loads(text)["traceEvents"]
            if event["ph"] == "X"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: no trace of axsparse ({type(error).__name__}: {error}); give one that "
            "axsparse plan --trace or train.trace wrote"
        ) from None


def _phase(name: str) -> str:
    if name not in PHASES:
        raise ValueError(f"no phase {name!r}")
    return name


def write(path: Path, spans: Iterable[Span], source: str) -> None:
    """Write a trace; OutputError if it cannot be written."""
    _write(path, [to_json(spans, source)])


def write_part(path: Path, replica: int, stage: int, spans: Iterable[Span]) -> None:
    """Write what `join` puts together; OutputError if it cannot be written."""
    _write(path, [part(replica, stage, spans)])


def join(path: Path, parts: Sequence[Path], source: str) -> None:
    """Make a trace of its ranks' parts, one at a time in memory, and remove them.

    OutputError if it cannot be written, or a part is not there.
    """

    def pieces() -> Iterator[str]:
        for number, each in enumerate(parts):
            yield BETWEEN if number else HEAD
            try:
                yield each.read_text(encoding="utf-8")
            except OSError as error:
                raise OutputError(
                    f"{each}: rank 0 cannot read this rank's part of the trace ({error.strerror}); "
                    "put the run directory where all hosts see it"
                ) from None
        yield tail(source)

    _write(path, pieces())
    for each in parts:
        each.unlink(missing_ok=True)


def _write(path: Path, pieces: Iterable[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise OutputError(
            f"{path}: the trace cannot be written ({error.strerror}); choose another place"
        ) from None


def read(path: Path) -> list[Span]:
    """Read a trace; MissingInputError if there is none, DataError if it is no trace."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingInputError(
            f"trace {path}: cannot be read ({error.strerror}); name the file of a trace"
        ) from None
    except UnicodeDecodeError:
        text = ""
    return from_json(text, str(path))


@dataclass(frozen=True)
class Difference:
    """What a phase of a stage takes in two traces: seconds a step, the mean over replicas."""

    stage: int
    phase: str
    first: float
    second: float

    @property
    def seconds(self) -> float:
        return self.second - self.first


def differences(first: Sequence[Span], second: Sequence[Span]) -> list[Difference]:
    """By phase and stage, the largest first; a stage that one lacks takes 0 there."""
    ours, theirs = _seconds(first), _seconds(second)
    found = [
        Difference(stage, phase, ours.get((stage, phase), 0.0), theirs.get((stage, phase), 0.0))
        for stage, phase in sorted(ours.keys() | theirs.keys())
    ]
    return sorted(found, key=lambda each: -abs(each.seconds))


def step_seconds(spans: Sequence[Span]) -> float:
    """From the first begin to the last end of a step, the mean over steps."""
    steps = {span.step for span in spans}
    lengths = [
        max(span.end for span in spans if span.step == step)
        - min(span.begin for span in spans if span.step == step)
        for step in steps
    ]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _seconds(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    runs = {(span.stage, span.replica, span.step) for span in spans}
    totals: dict[tuple[int, str], float] = {}
    for span in spans:
        key = (span.stage, span.phase)
        totals[key] = totals.get(key, 0.0) + span.end - span.begin
    times = {stage: sum(run[0] == stage for run in runs) for stage, _ in totals}
    return {(stage, phase): total / times[stage] for (stage, phase), total in totals.items()}
