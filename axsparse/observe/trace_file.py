"""Trace files of simulated and real steps, in Chrome's format, which Perfetto opens.

Every event is a complete one ("ph": "X"). `cat` is a phase of `observe.phases`, `name` the action
that it belongs to ("F3") or the phase, `pid` the replica, `tid` the stage, `args.step` the step;
`ts` and `dur` are in microseconds. The events of a rank never overlap, so the events of a phase
add up to its seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axsparse.observe.phases import PHASES
from axsparse.runtime.errors import DataError, OutputError, reading, writing

MICROSECONDS = 1e6
HEAD, BETWEEN = '{"traceEvents": [\n', ",\n"
"""A file consists of `HEAD`, the ranks' parts with `BETWEEN` between them, and `tail`."""


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time, in one phase."""

    step: int
    replica: int
    stage: int
    phase: str
    name: str
    """The action, such as "F3", or the phase."""
    begin: float
    """Seconds; `end` is in seconds, too."""
    end: float


def to_json(spans: Iterable[Span], source: str) -> str:
    """The text of a trace; `source` says what was traced."""
    ranks: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        ranks.setdefault((span.replica, span.stage), []).append(span)
    parts = (part(*rank, found) for rank, found in sorted(ranks.items()))
    return f"{HEAD}{BETWEEN.join(parts)}{tail(source)}"


def part(replica: int, stage: int, spans: Iterable[Span]) -> str:
    """The events of one rank as text; parts are joined by `BETWEEN`."""
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
    """The text after the events."""
    return f'\n], "otherData": {json.dumps({"source": source})}}}'


def _label(kind: str, replica: int, stage: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": replica, "tid": stage, "args": {"name": name}}


def from_json(text: str, where: str) -> list[Span]:
    """The spans of a trace's text; DataError if axsparse did not write it."""
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
    """Write one rank's part, for `join`; OutputError if it cannot be written."""
    _write(path, [part(replica, stage, spans)])


def join(path: Path, parts: Sequence[Path], source: str) -> None:
    """Join the ranks' parts to a trace, with one part in memory at a time, and remove them.

    Raises OutputError if the trace cannot be written or a part cannot be read.
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
    with writing(f"{path}: the trace", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)


def read(path: Path) -> list[Span]:
    """Read a trace; MissingInputError if it cannot be read, DataError if it is no trace."""
    try:
        with reading(f"trace {path}:", "name the file of a trace"):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    return from_json(text, str(path))


@dataclass(frozen=True)
class Difference:
    """How long a phase of a stage takes in two traces.

    Both are in seconds a step, the mean over replicas and steps.
    """

    stage: int
    phase: str
    first: float
    second: float

    @property
    def seconds(self) -> float:
        return self.second - self.first


def differences(first: Sequence[Span], second: Sequence[Span]) -> list[Difference]:
    """The differences of all phases and stages, largest first; a missing stage counts as 0."""
    ours, theirs = _seconds(first), _seconds(second)
    found = [
        Difference(stage, phase, ours.get((stage, phase), 0.0), theirs.get((stage, phase), 0.0))
        for stage, phase in sorted(ours.keys() | theirs.keys())
    ]
    return sorted(found, key=lambda each: -abs(each.seconds))


def step_seconds(spans: Sequence[Span]) -> float:
    """The mean time of a step, from the beginning of its first span to the end of its last."""
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
