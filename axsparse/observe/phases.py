"""The phases of a step, and the timers that split a step's time among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

PHASES = ("data", "compute", "compress", "optimizer", "p2p", "bubble", "collective", "other")
"""p2p is time in transport calls and copies, bubble is waiting with nothing to run, and other is
all time that no with-block claims."""

NUMBERS = {name: number for number, name in enumerate(PHASES)}
IS_WORK = tuple(name in ("data", "compute", "compress", "optimizer") for name in PHASES)
"""Whether a phase is work; a rank that waits enters the other phases over and over."""


class Phases:
    """Exclusive timers: every moment of a step belongs to exactly one phase.

    `with phases("compute"):` charges the time of the block to a phase; a block inside it interrupts
    the outer one. Outside a step nothing is kept, so evaluation and start-up may share code with
    training. Blocks nest like calls; so a hook that autograd runs in a separate thread, while its
    caller waits, is an inner block, too.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Blocks are entered for every microbatch and parameter, so there is one object a phase.
        self._blocks = {name: PhaseContext(self, number) for name, number in NUMBERS.items()}
        self._current = NUMBERS["other"]
        self._interrupted: list[int] = []
        self._seconds = [0.0] * len(PHASES)
        self._since = clock()
        self._began: float | None = None
        self._spans: list[tuple[str, str, float, float]] | None = None
        self.action = ""
        """The name of the spans that follow, such as "F3"; if empty, they are named by phase."""
        self.worked = 0
        """Grows whenever a block of work begins or ends, and not while the rank waits."""

    def __call__(self, name: str) -> PhaseContext:
        """The with-block of a phase; KeyError if there is no such phase."""
        return self._blocks[name]

    def compression(self, is_last: bool) -> AbstractContextManager[None]:
        """The with-block around the compression of one gradient; a GPU's timers need `is_last`."""
        del is_last
        return self._blocks["compress"]

    def begin_step(self) -> None:
        """Start a step with all timers at zero; an earlier step that has not ended is forgotten."""
        self._seconds = [0.0] * len(PHASES)
        self._began = self._since = self._clock()

    def end_step(self) -> Mapping[str, float]:
        """Seconds of every phase since `begin_step`, and their sum under the name "step"."""
        assert self._began is not None, "end_step without begin_step"
        self._switch(self._current)
        seconds = dict(zip(PHASES, self._seconds, strict=True))
        seconds["step"] = self._since - self._began
        self._began = None
        return seconds

    @property
    def current(self) -> str:
        """The phase under way."""
        return PHASES[self._current]

    def start_spans(self) -> None:
        """Keep from now on when each phase began and ended, in addition to the sums."""
        self._spans = []

    def take_spans(self) -> Iterable[tuple[str, str, float, float]]:
        """Phase, name, begin and end of every span since `start_spans`; then stop keeping them."""
        spans, self._spans = self._spans, None
        assert spans is not None, "take_spans without start_spans"
        return spans

    def _switch(self, number: int) -> None:
        """Charge the time since the last switch to the present phase, and enter another."""
        now = self._clock()
        if self._spans is not None:
            self._keep(self._spans, now)
        self._seconds[self._current] += now - self._since
        self.worked += IS_WORK[number] or IS_WORK[self._current]
        self._since = now
        self._current = number

    def _keep(self, spans: list[tuple[str, str, float, float]], now: float) -> None:
        """Add the span that ends now, or lengthen the last one if the two join."""
        if now <= self._since:
            return
        phase = PHASES[self._current]
        name = self.action or phase
        if spans and spans[-1][:2] == (phase, name) and spans[-1][3] == self._since:
            spans[-1] = (phase, name, spans[-1][2], now)
        else:
            spans.append((phase, name, self._since, now))


class PhaseContext:
    """The with-block of one phase; it has no state, so it may be entered inside itself."""

    __slots__ = ("_number", "_phases")

    def __init__(self, phases: Phases, number: int) -> None:
        self._phases = phases
        self._number = number

    def __enter__(self) -> None:
        phases = self._phases
        phases._interrupted.append(phases._current)
        phases._switch(self._number)

    def __exit__(self, *exception: object) -> None:
        phases = self._phases
        phases._switch(phases._interrupted.pop())
