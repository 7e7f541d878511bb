"""Every moment of a step belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.devices import BusyGpu, Clock
from support.runs import on_ranks

from axsparse.observe.phases import PHASES, DevicePhases, LateSeconds, Phases
from axsparse.observe.trace_file import Span, TraceRecorder, read
from axsparse.runtime.communication import Transport
from axsparse.runtime.grid import Grid


def times(**seconds: float) -> dict[str, float]:
    """The result of a step whose other phases are zero."""
    return {**dict.fromkeys(PHASES, 0.0), **seconds, "step": sum(seconds.values())}


def outside_blocks(phases: Phases, clock: Clock) -> None:
    clock.now += 1
    with phases("compute"):
        clock.now += 2
    clock.now += 4


def nested(phases: Phases, clock: Clock) -> None:
    with phases("compute"):
        clock.now += 1
        with phases("compress"):
            clock.now += 2
        clock.now += 4


def nested_in_itself(phases: Phases, clock: Clock) -> None:
    with phases("p2p"), phases("bubble"), phases("p2p"):
        clock.now += 1
    clock.now += 2


def raising(phases: Phases, clock: Clock) -> None:
    with phases("compute"):
        with suppress(ZeroDivisionError), phases("compress"):
            clock.now += 1
            raise ZeroDivisionError
        clock.now += 2


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (outside_blocks, times(compute=2, other=5)),
        (nested, times(compute=5, compress=2)),
        (nested_in_itself, times(p2p=1, other=2)),
        (raising, times(compress=1, compute=2)),
    ],
)
def test_time_belongs_to_the_innermost_block_around_it(
    step: Callable[[Phases, Clock], None], expected: dict[str, float]
) -> None:
    clock = Clock()
    phases = Phases(clock)
    step(phases, clock)  # blocks between steps count for no step
    clock.now += 8

    for _ in range(2):
        phases.begin_step()
        step(phases, clock)
        assert phases.end_step() == expected


def test_work_is_counted_and_looking_for_messages_is_not() -> None:
    phases = Phases(Clock())

    for waiting in ("p2p", "bubble", "collective", "other"):
        with phases(waiting), phases("collective"):
            pass
    assert phases.worked == 0
    for working in ("data", "compute", "compress", "optimizer"):
        before = phases.worked
        with phases(working):
            begun = phases.worked
        assert before < begun < phases.worked


class Gpu(BusyGpu):
    """A device with phases, and a host that spends time in them."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = DevicePhases(self, clock=lambda: self.now)

    def spend(self, phase: str, seconds: float, *, work: float = 0.0) -> None:
        """Let the host spend seconds in a phase, at whose beginning it enqueues work."""
        with self.phases(phase):
            if work:
                self.work(work)
            self.now += seconds


PhaseContext = tuple[str, float, float]
"""A phase, the seconds that the host spends in it, and the work that it enqueues before."""


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        # The host runs ahead.
        (
            [("compute", 0.001, 4), ("compress", 0.001, 2), ("p2p", 0.001, 0), ("compute", 0, 8)],
            times(compute=12, compress=2),
        ),
        # The bubble is what the GPU stands idle for: it is busy for five of these ten seconds.
        ([("compute", 1, 6), ("bubble", 10, 0), ("compute", 1, 2)], times(compute=8, bubble=5)),
        # The host waits for 8 s, and during 4 of them the GPU has nothing to do.
        (
            [
                *(("compute", 1, 5), ("p2p", 2, 0), ("bubble", 4, 0), ("collective", 1, 0)),
                *(("", 1, 0), ("compute", 1, 1)),
            ],
            times(compute=6, p2p=1, bubble=2, collective=0.5, other=0.5),
        ),
        # Each wait is divided by itself.
        (
            [
                *(("compute", 1, 3), ("p2p", 4, 0), ("compute", 1, 1)),
                *(("bubble", 4, 0), ("compute", 1, 1)),
            ],
            times(compute=5, p2p=2, bubble=4),
        ),
        # A step may end in a wait.
        ([("p2p", 1, 0), ("", 3, 0)], times(p2p=1, other=3)),
        # In a phase of work the time in which the host enqueues nothing is the phase's own.
        ([("data", 3, 0), ("compute", 5, 2)], times(data=3, compute=5)),
        # A wait that the host did not see is that of the phase that ended.
        ([("collective", 0, 3)], times(other=3)),
    ],
)
def test_the_gpus_time_is_divided_among_phases(
    blocks: list[PhaseContext], expected: dict[str, float]
) -> None:
    gpu = Gpu()

    gpu.phases.begin_step()
    for phase, seconds, work in blocks:
        if phase:
            gpu.spend(phase, seconds, work=work)
        else:
            gpu.now += seconds
    found = gpu.phases.end_step()

    assert found == pytest.approx(expected, abs=0.002)


def test_a_step_ends_without_waiting_for_the_gpu_and_its_figures_wait() -> None:
    gpu = Gpu()
    gpu.stands_still = True

    gpu.phases.begin_step()
    gpu.spend("optimizer", 1, work=4)
    seconds = gpu.phases.end_step()  # fails if it waits, since the device is frozen

    assert list(seconds) == [*PHASES, "step"] and len(seconds) == 9
    with pytest.raises(AssertionError, match="waits for a device that stands still"):
        seconds["optimizer"]
    gpu.stands_still = False
    assert seconds["optimizer"] == 4


def test_polling_sets_no_marks() -> None:
    gpu = Gpu()

    gpu.phases.begin_step()
    gpu.spend("compute", 1, work=1)
    for _ in range(10_000):
        gpu.spend("p2p", 1)
        with gpu.phases("bubble"):
            gpu.spend("collective", 1)
            gpu.now += 2
    gpu.spend("compute", 1, work=1)
    seconds = gpu.phases.end_step()

    assert gpu.marks == 6  # begin, twice in and out of work, end
    assert seconds == times(compute=2, p2p=10_000, bubble=20_000, collective=10_000)


def test_a_step_that_was_not_ended_is_forgotten_and_its_marks_are_not() -> None:
    gpu = Gpu()
    for _ in range(3):
        gpu.phases.begin_step()
        gpu.spend("compute", 1, work=3)
        gpu.spend("p2p", 8)
    gpu.phases.begin_step()
    gpu.spend("bubble", 1)
    gpu.spend("compute", 1, work=3)
    seconds = gpu.phases.end_step()

    assert seconds == times(compute=3, bubble=1)
    assert gpu.marks == 4


# -- traces -----------------------------------------------------------------------------------


def play(transport: Transport, folder: Path) -> None:
    """Four steps of a GPU that is busy for 2 s after its host; rank r computes r + 5 seconds."""
    gpu, rank = Gpu(), transport.rank
    gpu.now, phases = 1000.0 * (rank + 1), gpu.phases
    coords = Grid(2, 1).coords(rank)
    tracing = TraceRecorder(transport, coords, phases, folder, range(2, 4), lambda: gpu.now)
    for step in range(1, 5):
        gpu.stands_still = step != 2  # where the GPU's clock is tied to the host's
        tracing.begin(step)
        gpu.stands_still = True
        phases.begin_step()
        phases.action = "F0"
        gpu.spend("compute", 1, work=rank + 5)
        for _ in range(4):
            gpu.spend("bubble", 1)
            gpu.spend("p2p", 1)
        phases.action = "B0"
        gpu.spend("compute", 0, work=2)
        phases.action = ""
        phases.end_step()
        gpu.stands_still = step != 3  # where the trace is written
        tracing.end(step)


def test_a_trace_has_the_gpus_stretches_on_the_hosts_axis(tmp_path: Path) -> None:
    on_ranks(2, lambda transport: play(transport, tmp_path))

    [path] = (tmp_path / "trace").iterdir()
    expected = []
    for rank in (0, 1):
        # Both begin 2 s after the agreement on time, when their GPUs have ended step 1.
        for step, begin, end in ((2, 2.0, 13.0), (3, 13.0, 22.0)):
            idle, back = begin + 5 + rank, end - 2
            half = (idle + back) / 2
            expected += [
                Span(step, 0, rank, "compute", "F0", begin, idle),
                Span(step, 0, rank, "p2p", "p2p", idle, half),
                Span(step, 0, rank, "bubble", "bubble", half, back),
                Span(step, 0, rank, "compute", "B0", back, end),
            ]
    assert read(path) == expected


# -- compressions ---------------------------------------------------------------------------


def backwards(gpu: Gpu, microbatches: int, tensors: int) -> LateSeconds:
    """A step whose every backward computes 2 s and compresses 1 s for each tensor."""
    gpu.phases.begin_step()
    for number in range(microbatches):
        with gpu.phases("compute"):
            for _ in range(tensors):
                gpu.work(2.0)
                with gpu.phases.compression(number == microbatches - 1):
                    gpu.work(1.0)
    return gpu.phases.end_step()


def test_only_the_last_microbatch_marks_its_compressions_and_the_others_last_as_long() -> None:
    few, many = Gpu(), Gpu()

    backwards(few, microbatches=1, tensors=10)
    seconds = backwards(many, microbatches=101, tensors=10)

    # A backward more is one stretch more, whatever its number of tensors.
    assert many.marks - few.marks == 2 * 100
    assert seconds == pytest.approx(times(compute=101 * 10 * 2, compress=101 * 10 * 1))
