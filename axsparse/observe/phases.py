"""The phases of a step, and the timers that split a step's time among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from axsparse.runtime.gpu.device import Device, Mark

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


class DevicePhases(Phases):
    """Exclusive timers of a GPU's compute stream: the seconds in which it worked, and waited, by
    cause.

    The host sets marks on the compute stream wherever it begins or ends a phase of work, and asks
    for their times after the GPU has passed them (docs/decisions/028):

        host   compute F0 | p2p | bubble p2p bubble … | compute F1 | …
        marks            m0                          m1           m2
        GPU    F0 F0 F0 F0|            idle           |F1 F1 F1 F1|

    A stretch goes from one mark to the next. A stretch of work belongs to its phase entirely; the
    others are divided in proportion to the host's seconds in each waiting phase. Only the
    compressions of a step's last microbatch have marks; their mean counts for the others.

    Only three things wait for the GPU: reading what `end_step` returns, reading what `take_spans`
    returns, and the first `start_spans`. Spans cover entire steps, in the host's time.
    """

    def __init__(self, device: Device, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._device = device
        self._free: list[Mark] = []
        self._step: LateSeconds | None = None
        self._traced: list[LateSeconds] | None = None
        self._anchor: Mark | None = None
        self._anchored = 0.0
        """The time on the host's clock when the GPU passed the anchor."""

    def compression(self, is_last: bool) -> AbstractContextManager[None]:
        if self._step is not None:
            self._step.compressed[is_last] += 1
        if is_last:
            return self._blocks["compress"]
        self.worked += 1
        return nullcontext()

    def begin_step(self) -> None:
        if self._step is not None:
            self._free += self._step.marks()
        super().begin_step()
        anchor = None if self._traced is None else self._anchor
        self._step = LateSeconds(self._set_mark(), anchor, self._free)

    def end_step(self) -> LateSeconds:
        """Seconds of every phase since `begin_step`, and their sum, "step"; reading them waits."""
        assert self._step is not None, "end_step without begin_step"
        self._charge()
        self._end_stretch(self._step)
        step, self._step = self._step, None
        if self._traced is not None and step.anchor is not None:
            self._traced.append(step)
        return step

    def start_spans(self) -> None:
        """Keep the stretches of all steps that begin from now on. The first call waits for the GPU,
        to relate its clock to the host's."""
        self._traced = []
        if self._anchor is None:
            self._anchor = self._set_mark()
            self._anchor.wait()
            self._anchored = self._clock()

    def take_spans(self) -> Iterable[tuple[str, str, float, float]]:
        """As `Phases.take_spans`, to be read once."""
        traced, self._traced = self._traced, None
        assert traced is not None, "take_spans without start_spans"
        return (
            (phase, name, self._anchored + begin, self._anchored + end)
            for step in traced
            for phase, name, begin, end in step.parts()
            if end > begin
        )

    def _switch(self, number: int) -> None:
        """Charge the host's time to the present phase, and enter another; work ends a stretch."""
        is_work = IS_WORK[number] or IS_WORK[self._current]
        if self._step is not None:
            self._charge()
            if is_work:
                self._end_stretch(self._step)
        self.worked += is_work
        self._current = number

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since = now

    def _end_stretch(self, step: LateSeconds) -> None:
        phase = PHASES[self._current]
        if IS_WORK[self._current]:  # no other phase was entered since the last mark
            stretch = _Stretch(self._set_mark(), phase, self.action or phase, ())
        else:
            stretch = _Stretch(self._set_mark(), phase, phase, self._seconds)
        self._seconds = [0.0] * len(PHASES)
        step.stretches.append(stretch)

    def _set_mark(self) -> Mark:
        mark = self._free.pop() if self._free else self._device.mark()
        mark.set()
        return mark


class _Stretch(NamedTuple):
    """The time between a mark and the one before it."""

    end: Mark
    last: str
    name: str
    waited: Iterable[float]
    """The host's seconds in each phase; empty if the stretch is work."""


@dataclass(eq=False)
class LateSeconds(Mapping[str, float]):
    """Seconds of a step by phase; reading them waits until the GPU is through with the step. They
    are the times between the marks of the step, which are read once."""

    begin: Mark
    anchor: Mark | None
    free: list[Mark]
    """Takes the marks once their times are read."""
    stretches: list[_Stretch] = field(default_factory=list)
    compressed: list[int] = field(default_factory=lambda: [0, 0])
    """How many gradients were compressed without marks, and how many with marks."""

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*PHASES, "step"))

    def __len__(self) -> int:
        return len(PHASES) + 1

    def marks(self) -> list[Mark]:
        return [self.begin, *(stretch.end for stretch in self.stretches)]

    def parts(self) -> Iterator[tuple[str, str, float, float]]:
        """Phase, name, begin and end of each part of the GPU's time, in order, in seconds since the
        anchor; since the step began if there is none."""
        for stretch, (now, end) in zip(self.stretches, pairwise(self._times), strict=True):
            host = sum(stretch.waited)
            if not host:
                yield stretch.last, stretch.name, now, end
                continue
            seconds = end - now
            for phase, waited in zip(PHASES, stretch.waited, strict=True):
                if waited > 0:
                    begin, now = now, now + seconds * (waited / host)
                    yield phase, phase, begin, now

    @cached_property
    def _times(self) -> list[float]:
        """When the GPU passed each mark; the first reading waits for the end of the step."""
        marks = self.marks()
        marks[-1].wait()
        began = 0.0 if self.anchor is None else self.begin.since(self.anchor)
        lengths = (later.since(earlier) for earlier, later in pairwise(marks))
        times = list(accumulate(lengths, initial=began))
        self.free += marks
        return times

    @cached_property
    def _seconds(self) -> dict[str, float]:
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, _, begin, end in self.parts():
            sums[phase] += end - begin
        without, marked = self.compressed
        if marked:
            # Compressions without marks stand inside stretches of compute.
            moved = min(sums["compress"] * without / marked, sums["compute"])
            sums["compute"] -= moved
            sums["compress"] += moved
        return {**sums, "step": sum(sums.values())}
