"""Traces some steps of a run: every rank's phases, gathered into one file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from axsparse.comm import Transport
from axsparse.data_parallel.agreement import gather_texts, sum_by_owner
from axsparse.grid import Place
from axsparse.observe.phases import Phases
from axsparse.observe.trace import Span, write

TRACES = "trace"
"""In the run directory."""


class Tracing:
    """Traces the steps `first` to `last`; all ranks call it together."""

    def __init__(
        self,
        transport: Transport,
        place: Place,
        phases: Phases,
        folder: Path,
        *,
        first: int,
        last: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` is the one of `phases`."""
        self._transport = transport
        self._place = place
        self._phases = phases
        self._folder = folder
        self._first = first
        self._last = last
        self._clock = clock
        self._zero = 0.0
        self._spans: list[tuple[int, str, str, float, float]] = []

    def begin(self, step: int) -> None:
        """Before a step; ranks agree before the first one on when time begins, since clocks of
        hosts differ. They leave that agreement at almost the same moment."""
        if not self._first <= step <= self._last:
            return
        if step == self._first:
            sum_by_owner(self._transport.world, self._transport.backoff, [0.0])
            self._zero = self._clock()
        self._phases.start_spans()

    def end(self, step: int) -> None:
        """After a step; the last one writes the file, on rank 0. OutputError if it cannot."""
        if not self._first <= step <= self._last:
            return
        self._spans += [
            (step, phase, name, begin - self._zero, end - self._zero)
            for phase, name, begin, end in self._phases.take_spans()
        ]
        if step == self._last:
            self._write()

    def _write(self) -> None:
        place, transport = self._place, self._transport
        own = json.dumps([place.replica, place.stage, self._spans])
        self._spans = []
        texts = gather_texts(transport.world, transport.backoff, own)
        if place.rank:
            return
        found = [
            Span(step, replica, stage, phase, name, begin, end)
            for replica, stage, spans in map(json.loads, texts)
            for step, phase, name, begin, end in spans
        ]
        name = f"steps-{self._first}-{self._last}.json"
        write(self._folder / TRACES / name, found, f"run: {self._folder}")
