"""The phases of a GPU: the seconds in which its compute stream worked, and waited, by cause.

The host runs ahead of its GPU, so the host's clock says little. Instead, the host sets marks on
the compute stream wherever it begins or ends a phase of work, and asks for their times after the
GPU has passed them:

    host   compute F0 | p2p | bubble p2p bubble … | compute F1 | …
    marks            m0                          m1           m2
    GPU    F0 F0 F0 F0|            idle           |F1 F1 F1 F1|

A stretch goes from one mark to the next. Every moment belongs to exactly one stretch, so phases
add up to the step. A stretch of work belongs to its phase entirely. Between m0 and m1 the host
switches between waiting phases thousands of times without setting marks, and the stretch is
divided in proportion to the host's seconds in each. Such a stretch lasts only while the GPU has
nothing to do: if F0 ends on the GPU when the host is waiting already, it begins there.

A gradient is compressed for each tensor and microbatch: two marks each would be hundreds of
thousands a step. So only the compressions of a step's last microbatch have marks, and each of the
others is taken to have lasted as long as these did on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from axsparse.observe.phases import IS_WORK, PHASES, Phases
from axsparse.runtime.gpu.device_protocol import Device, Mark


class DevicePhases(Phases):
    """Exclusive timers of a GPU's compute stream, with the interface of a host's timers.

    Only three things wait for the GPU: reading what `end_step` returns, reading what `take_spans`
    returns, and the first `start_spans`. Spans cover entire steps, in the host's time.
    """

    def __init__(self, device: Device, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._device = device
        self._free: list[Mark] = []
        """Marks that are free to be set again."""
        self._step: LateSeconds | None = None
        self._traced: list[LateSeconds] | None = None
        self._anchor: Mark | None = None
        self._anchored = 0.0
        """The time on the host's clock when the GPU passed the anchor."""

    def compression(self, is_last: bool) -> AbstractContextManager[None]:
        """The with-block around one compression; only in a step's last microbatch it sets marks."""
        if self._step is not None:
            self._step.compressed[is_last] += 1
        if is_last:
            return self._blocks["compress"]
        self.worked += 1
        return nullcontext()

    def begin_step(self) -> None:
        """Start a step with all timers at zero; an earlier step that has not ended is forgotten."""
        if self._step is not None:
            self._free += self._step.marks()
        self._seconds = [0.0] * len(PHASES)
        self._since = self._clock()
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
        """Keep the stretches of all steps that begin from now on.

        The first call waits for the GPU, to relate its clock to the host's.
        """
        self._traced = []
        if self._anchor is None:
            self._anchor = self._set_mark()
            self._anchor.wait()
            self._anchored = self._clock()

    def take_spans(self) -> Iterable[tuple[str, str, float, float]]:
        """Phase, name, begin and end of every stretch since `start_spans`, to be read once; then
        stop keeping them."""
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
    """The phase that ends at the mark."""
    name: str
    waited: Iterable[float]
    """The host's seconds in each phase; empty if the stretch is work."""


class LateSeconds(Mapping[str, float]):
    """Seconds of a step by phase; reading them waits until the GPU is through with the step.

    They are the times between the marks of the step, which are read once.
    """

    def __init__(self, begin: Mark, anchor: Mark | None, free: list[Mark]) -> None:
        """The marks are put into `free` once their times are read."""
        self.anchor = anchor
        self.stretches: list[_Stretch] = []
        self.compressed = [0, 0]
        """How many gradients were compressed without marks, and how many with marks."""
        self._begin = begin
        self._free = free

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*PHASES, "step"))

    def __len__(self) -> int:
        return len(PHASES) + 1

    def marks(self) -> list[Mark]:
        """All marks of the step, in order."""
        return [self._begin, *(stretch.end for stretch in self.stretches)]

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
        began = 0.0 if self.anchor is None else self._begin.since(self.anchor)
        lengths = (later.since(earlier) for earlier, later in pairwise(marks))
        times = list(accumulate(lengths, initial=began))
        self._free += marks
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
