"""The phases of a GPU: what its compute stream was busy with, and what it waited for.

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
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from axsparse.observe.phases import IS_WORK, NUMBERS, PHASES, Block, Phases
from axsparse.runtime.gpu.device_protocol import Device, Mark


class Ranges(Protocol):
    """Named ranges for a profiler, which nest in each thread, like those of `torch.cuda.nvtx`."""

    def range_push(self, name: str, /) -> object:
        """Begin a range inside the present one."""
        ...

    def range_pop(self) -> object:
        """End the present range."""
        ...


def make_phases(device: Device | None, *, nvtx: bool) -> Phases:
    """The timers of a rank, of its GPU if it has one; `nvtx` needs a GPU."""
    if device is None:
        assert not nvtx, "the settings were checked"
        return Phases()
    return DevicePhases(device, ranges=torch.cuda.nvtx if nvtx else None)


class DevicePhases(Phases):
    """Exclusive timers of a GPU's compute stream, with the interface of a host's timers.

    Only three things wait for the GPU: reading what `end_step` returns, reading what `take_spans`
    returns, and the first `start_spans`. Spans cover whole steps, in the host's time.
    """

    __slots__ = (
        "_action",
        "_anchor",
        "_anchored",
        "_device",
        "_free",
        "_ranges",
        "_sampled",
        "_step",
        "_traced",
    )

    def __init__(
        self,
        device: Device,
        *,
        ranges: Ranges | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`ranges` are told of every phase and every action."""
        self._action = ""
        self._ranges = ranges
        super().__init__(clock)
        if ranges is not None:
            self._blocks = {
                name: _RangedBlock(self, number, ranges) for name, number in NUMBERS.items()
            }
        self._sampled = _SampledBlock(self, ranges)
        self._device = device
        self._free: list[Mark] = []
        """Marks that are free to be set again."""
        self._step: LateSeconds | None = None
        self._traced: list[LateSeconds] | None = None
        self._anchor: Mark | None = None
        self._anchored = 0.0
        """The time on the host's clock when the GPU passed the anchor."""

    @property
    def action(self) -> str:
        """The name of the work that follows, such as "F3"; if empty, work is named by phase."""
        return self._action

    @action.setter
    def action(self, action: str) -> None:
        if self._ranges is not None:
            if self._action:
                self._ranges.range_pop()
            if action:
                self._ranges.range_push(action)
        self._action = action

    def compression(self, is_last: bool) -> AbstractContextManager[None]:
        """The with-block around one compression; only in a step's last microbatch it sets marks."""
        if self._step is not None:
            self._step.compressed[is_last] += 1
        return self._blocks["compress"] if is_last else self._sampled

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
        return self._spans_of(traced)

    def _spans_of(self, steps: list[LateSeconds]) -> Iterator[tuple[str, str, float, float]]:
        for step in steps:
            now = self._anchored + step.after_anchor()
            for phase, name, seconds in step.parts():
                begin, now = now, now + seconds
                if seconds > 0:
                    yield phase, name, begin, now

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
        current = self._current
        if IS_WORK[current]:  # no other phase was entered since the last mark
            waited = None
            self._seconds[current] = 0.0
        else:
            waited, self._seconds = self._seconds, [0.0] * len(PHASES)
        step.stretches.append(_Stretch(self._set_mark(), current, self._action, waited))

    def _set_mark(self) -> Mark:
        mark = self._free.pop() if self._free else self._device.mark()
        mark.set()
        return mark


class _RangedBlock(Block):
    """The with-block of one phase, as a range for a profiler."""

    __slots__ = ("_ranges",)

    def __init__(self, phases: Phases, number: int, ranges: Ranges) -> None:
        super().__init__(phases, number)
        self._ranges = ranges

    def __enter__(self) -> None:
        self._ranges.range_push(PHASES[self._number])
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._ranges.range_pop()


class _SampledBlock:
    """The with-block of a compression that sets no marks."""

    def __init__(self, phases: Phases, ranges: Ranges | None) -> None:
        self._phases = phases
        self._ranges = ranges

    def __enter__(self) -> None:
        self._phases.worked += 1
        if self._ranges is not None:
            self._ranges.range_push("compress")

    def __exit__(self, *exception: object) -> None:
        self._phases.worked += 1
        if self._ranges is not None:
            self._ranges.range_pop()


class _Stretch(NamedTuple):
    """The time between a mark and the one before it."""

    end: Mark
    last: int
    """The number of the phase that ends at the mark."""
    action: str
    waited: list[float] | None
    """The host's seconds in each phase; None if the stretch is work."""

    def divided(self, seconds: float) -> Iterator[tuple[str, str, float]]:
        """Phase, name and seconds of each part of the stretch, which took the GPU `seconds`."""
        phase = PHASES[self.last]
        if self.waited is None:
            yield phase, self.action or phase, seconds
            return
        total = sum(self.waited)
        if total == 0:
            yield phase, phase, seconds
            return
        for phase, waited in zip(PHASES, self.waited, strict=True):
            if waited > 0:
                yield phase, phase, seconds * (waited / total)


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
        self._after_anchor = 0.0
        self._lengths: list[float] | None = None
        self._seconds: dict[str, float] | None = None

    def __getitem__(self, name: str) -> float:
        if self._seconds is None:
            self._seconds = self._sums()
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*PHASES, "step"))

    def __len__(self) -> int:
        return len(PHASES) + 1

    def marks(self) -> list[Mark]:
        """All marks of the step, in order."""
        return [self._begin, *(stretch.end for stretch in self.stretches)]

    def parts(self) -> Iterator[tuple[str, str, float]]:
        """Phase, name and seconds of each part of the GPU's time, in order."""
        for stretch, length in zip(self.stretches, self._read(), strict=True):
            yield from stretch.divided(length)

    def after_anchor(self) -> float:
        """Seconds from the anchor to the beginning of the step."""
        self._read()
        return self._after_anchor

    def _sums(self) -> dict[str, float]:
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, _, seconds in self.parts():
            sums[phase] += seconds
        without, marked = self.compressed
        if marked:
            # Compressions without marks stand inside stretches of compute.
            moved = min(sums["compress"] * without / marked, sums["compute"])
            sums["compute"] -= moved
            sums["compress"] += moved
        return {**sums, "step": sum(sums.values())}

    def _read(self) -> list[float]:
        """Seconds of every stretch; the first call waits for the end of the step."""
        if self._lengths is None:
            marks = self.marks()
            marks[-1].wait()
            self._lengths = [later.since(earlier) for earlier, later in pairwise(marks)]
            if self.anchor is not None:
                self._after_anchor = self._begin.since(self.anchor)
            self._free += marks
        return self._lengths
