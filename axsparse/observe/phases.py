"""The phases of a step, and the timers that split a step's time among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

PHASES = ("data", "compute", "compress", "optimizer", "p2p", "bubble", "collective", "other")
"""p2p is time in transport calls and copies, bubble is waiting with nothing runnable,
other is whatever no with-block claims."""

NUMBERS = {name: number for number, name in enumerate(PHASES)}
IS_WORK = tuple(name in ("data", "compute", "compress", "optimizer") for name in PHASES)
"""The others are entered over and over by a rank that waits."""


class Phases:
    """Exclusive timers: every moment of a step belongs to exactly one phase.

    `with phases("compute"):` charges the block to a phase; a block inside it interrupts
    the outer one. Outside a step the blocks do nothing that is kept, so evaluation and
    start-up may share code with training. Blocks nest like calls, so a hook that autograd
    runs in a thread of its own, while its caller waits, is an inner block too.
    """

    __slots__ = (
        "_began",
        "_blocks",
        "_clock",
        "_current",
        "_interrupted",
        "_seconds",
        "_since",
        "_spans",
        "action",
        "worked",
    )

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # One object per name, made once: blocks are entered per microbatch and per parameter.
        self._blocks = {name: Block(self, number) for name, number in NUMBERS.items()}
        self._current = NUMBERS["other"]
        self._interrupted: list[int] = []
        self._seconds = [0.0] * len(PHASES)
        self._since = clock()
        self._began: float | None = None
        self._spans: list[tuple[str, str, float, float]] | None = None
        self.action = ""
        """What spans are named by, such as "F3"; empty: by their phase."""
        self.worked = 0
        """Grows with every block of work that begins or ends; a rank that waits keeps it."""

    def __call__(self, name: str) -> Block:
        """The with-block of a phase; KeyError if there is no such phase."""
        return self._blocks[name]

    def begin_step(self) -> None:
        """Start a step with all timers at zero; a step that was not ended is forgotten."""
        self._seconds = [0.0] * len(PHASES)
        self._began = self._since = self._clock()

    def end_step(self) -> Mapping[str, float]:
        """Seconds of every phase since `begin_step`, and their sum, "step"."""
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
        """Keep from now on every stretch of a phase, not their sums alone."""
        self._spans = []

    def take_spans(self) -> Iterable[tuple[str, str, float, float]]:
        """Phase, name, begin and end of every stretch since `start_spans`, which ends."""
        spans, self._spans = self._spans, None
        assert spans is not None, "take_spans without start_spans"
        return spans

    def _switch(self, number: int) -> None:
        """Charge the time since the last switch to the running phase, and run another."""
        now = self._clock()
        if self._spans is not None:
            self._keep(self._spans, now)
        self._seconds[self._current] += now - self._since
        self.worked += IS_WORK[number] or IS_WORK[self._current]
        self._since = now
        self._current = number

    def _keep(self, spans: list[tuple[str, str, float, float]], now: float) -> None:
        """Add the stretch that ends now, or lengthen the last one that it goes on with."""
        if now <= self._since:
            return
        phase = PHASES[self._current]
        name = self.action or phase
        if spans and spans[-1][:2] == (phase, name) and spans[-1][3] == self._since:
            spans[-1] = (phase, name, spans[-1][2], now)
        else:
            spans.append((phase, name, self._since, now))


class Block:
    """The with-block of one phase; it keeps no state, so it may be entered inside itself."""

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
