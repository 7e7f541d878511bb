"""Traces of steps, in Chrome's format, which Perfetto opens.

Every event is a complete one ("ph": "X"). `cat` is a phase of `observe.phases`, `name` the action
that it belongs to ("F3") or the phase, `pid` the replica, `tid` the stage, `args.step` the step;
`ts` and `dur` are in microseconds. The events of a rank never overlap, so the events of a phase
add up to its seconds.

Every rank writes a part next to the file, and rank 0 joins the parts. So a trace of
thousands of ranks is never in one rank's memory, and none of it is sent.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axsparse.observe.phases import PHASES, Phases
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import DataError, OutputError, reading, writing
from axsparse.runtime.exchange import gather_numbers, together
from axsparse.runtime.files.safetensors import MALFORMED
from axsparse.runtime.grid import RankCoords

TRACES = "trace"
"""The folder of the traces, in the run directory."""
TRACE_FILE = re.compile(r"steps-\d+-(\d+)\.json")
MICROSECONDS = 1e6
BETWEEN = ",\n"
MOST_STAGES = 10_000
"""No trace has more; a timeline has a row for each."""


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


def _label(kind: str, replica: int, stage: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": replica, "tid": stage, "args": {"name": name}}


def _phase(name: str) -> str:
    if name not in PHASES:
        raise ValueError(f"no phase {name!r}")
    return name


def join(path: Path, parts: Sequence[Path], source: str) -> None:
    """Join the ranks' parts to a trace, with one part in memory at a time, and remove them. Raises
    OutputError if the trace cannot be written or a part cannot be read."""

    def pieces() -> Iterator[str]:
        yield '{"traceEvents": [\n'
        for number, each in enumerate(parts):
            try:
                events = each.read_text(encoding="utf-8")
            except OSError as error:
                raise OutputError(
                    f"{each}: rank 0 cannot read this rank's part of the trace ({error.strerror}); "
                    "put the run directory where all hosts see it"
                ) from None
            yield BETWEEN * (number > 0) + events
        yield f'\n], "otherData": {json.dumps({"source": source})}}}'

    _write(path, pieces())
    for each in parts:
        each.unlink(missing_ok=True)


def _write(path: Path, pieces: Iterable[str]) -> None:
    with writing(f"{path}: the trace", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)


def read(path: Path) -> list[Span]:
    """The spans of a trace; MissingInputError if it cannot be read, DataError if axsparse did not
    write it."""
    with reading(f"trace {path}:", "name the file of a trace"):
        text = path.read_bytes()
    try:
        return [_span(event) for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    except MALFORMED as error:
        raise DataError(
            f"{path}: no trace of axsparse ({type(error).__name__}: {error}); give one that "
            "train.trace wrote"
        ) from None


def _span(event: dict[str, Any]) -> Span:
    span = Span(
        step=int(event["args"]["step"]),
        replica=int(event["pid"]),
        stage=int(event["tid"]),
        phase=_phase(event["cat"]),
        name=str(event["name"]),
        begin=event["ts"] / MICROSECONDS,
        end=(event["ts"] + event["dur"]) / MICROSECONDS,
    )
    if not (
        math.isfinite(span.begin) and math.isfinite(span.end) and 0 <= span.stage < MOST_STAGES
    ):
        raise ValueError(f"stage {span.stage} from {span.begin} to {span.end} s")
    return span


def file_name(steps: range) -> str:
    """The name of the trace of these steps of a run."""
    return f"steps-{steps[0]}-{steps[-1]}.json"


def last_step(trace: Path) -> int:
    """The last step of a run's trace, by its `file_name`, so that the trace need not be read; -1
    for a file of another name."""
    named = TRACE_FILE.fullmatch(trace.name)
    return int(named[1]) if named else -1


@dataclass(eq=False)
class TraceRecorder:
    """Traces `steps` of a run, consecutive numbers from 1; all ranks call it together."""

    transport: Transport
    coords: RankCoords
    phases: Phases
    folder: Path
    steps: range
    clock: Callable[[], float] = time.perf_counter
    """The clock of `phases`."""
    _zero: float = field(default=0.0, init=False)
    _taken: list[tuple[int, Iterable[tuple[str, str, float, float]]]] = field(
        default_factory=list, init=False
    )

    def begin(self, step: int) -> None:
        """Begin a step. The clocks of hosts differ: time begins where the ranks leave a collective
        operation before the first traced step, at almost the same moment."""
        if step not in self.steps:
            return
        if step == self.steps[0]:
            gather_numbers(self.transport, [0.0])
            self._zero = self.clock()
        self.phases.start_spans()

    def end(self, step: int) -> None:
        """End a step; the last traced one writes the file. Raises OutputError on all
        ranks if one cannot write its part, and on rank 0 if it cannot join the parts."""
        if step not in self.steps:
            return
        # A GPU may still run this step; only the writing of all waits for it.
        self._taken.append((step, self.phases.take_spans()))
        if step != self.steps[-1]:
            return
        coords, zero, taken, self._taken = self.coords, self._zero, self._taken, []
        spans = [
            Span(step, coords.replica, coords.stage, phase, name, begin - zero, end - zero)
            for step, of_step in (taken if coords.tp_rank == 0 else ())
            for phase, name, begin, end in of_step
        ]
        trace = self.folder / TRACES / file_name(self.steps)
        parts = [trace.with_suffix(f".rank-{each}") for each in range(coords.grid.size)]
        text = part(coords.replica, coords.stage, spans)
        together(self.transport, lambda: _write(parts[coords.rank], [text]))
        if coords.rank == 0:
            join(trace, parts, f"run: {self.folder}")
