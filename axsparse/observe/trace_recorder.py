"""Traces some steps of a run: the phases of every rank, in one file.

Every rank writes its own part beside that file, and rank 0 joins the parts. So a trace of
thousands of ranks is never in one rank's memory, and none of it is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from axsparse.observe.phases import Phases
from axsparse.observe.trace_file import Span, join, write_part
from axsparse.runtime.communication import Transport
from axsparse.runtime.exchange import sum_by_owner, together
from axsparse.runtime.grid import Place

TRACES = "trace"
"""The folder of the traces, in the run directory."""


class TraceRecorder:
    """Traces `steps`; all ranks call it together."""

    def __init__(
        self,
        transport: Transport,
        place: Place,
        phases: Phases,
        folder: Path,
        steps: range,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`steps` are consecutive numbers, from 1. `clock` is the clock of `phases`."""
        self._transport = transport
        self._place = place
        self._phases = phases
        self._folder = folder
        self._steps = steps
        self._clock = clock
        self._zero = 0.0
        self._taken: list[tuple[int, Iterable[tuple[str, str, float, float]]]] = []

    def begin(self, step: int) -> None:
        """Called before a step.

        The clocks of hosts differ. Before the first traced step the ranks run a collective
        operation, which they leave at almost the same moment: there time begins.
        """
        if step not in self._steps:
            return
        if step == self._steps[0]:
            sum_by_owner(self._transport.world, self._transport.backoff, [0.0])
            self._zero = self._clock()
        self._phases.start_spans()

    def end(self, step: int) -> None:
        """Called after a step; the last traced step writes the file.

        Raises OutputError on all ranks if one cannot write its part, and on rank 0 if it cannot
        join the parts.
        """
        if step not in self._steps:
            return
        # A GPU may still run this step; only `_write` waits for it.
        self._taken.append((step, self._phases.take_spans()))
        if step == self._steps[-1]:
            self._write()

    def _write(self) -> None:
        place = self._place
        own = [
            Span(
                step, place.replica, place.stage, phase, name, begin - self._zero, end - self._zero
            )
            for step, spans in self._taken
            for phase, name, begin, end in spans
        ]
        self._taken = []
        whole = self._folder / TRACES / f"steps-{self._steps[0]}-{self._steps[-1]}.json"
        parts = [whole.with_suffix(f".rank-{rank}") for rank in range(place.grid.size)]

        def write_own() -> None:
            write_part(parts[place.rank], place.replica, place.stage, own)

        together(self._transport, write_own)
        if place.rank == 0:
            join(whole, parts, f"run: {self._folder}")
