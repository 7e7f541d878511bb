"""Steps of all ranks in one file, by a clock of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axsparse.observe.phases import Phases
from axsparse.observe.trace_file import Span, read
from axsparse.observe.trace_recorder import TraceRecorder
from axsparse.runtime.errors import OutputError
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def play(rank: int, world: LocalWorld[Any], folder: Path, actions: int = 1) -> LocalTransport:
    """Four steps on a host whose clock shows anything; rank r computes r + 1 seconds."""
    clock = Clock(1000.0 * rank)
    transport, phases = LocalTransport(world, rank), Phases(clock)
    place = Grid(2, 1).place(rank)
    tracing = TraceRecorder(transport, place, phases, folder, range(2, 4), clock)
    for step in range(1, 5):
        tracing.begin(step)
        phases.begin_step()
        for number in range(actions):
            phases.action = f"F{number}"
            with phases("compute"):
                clock.now += rank + 1
        phases.action = ""
        with phases("bubble"):
            clock.now += 3
        with phases("bubble"):
            clock.now += 1
        phases.end_step()
        clock.now += 0.5
        tracing.end(step)
    return transport


def test_the_steps_asked_for_are_traced_on_all_ranks_from_one_zero(tmp_path: Path) -> None:
    world: LocalWorld[object] = LocalWorld(2)
    world.run(lambda rank: play(rank, world, tmp_path))

    [path] = (tmp_path / "trace").iterdir()
    assert path.name == "steps-2-3.json"
    assert read(path) == [
        Span(2, 0, 0, "compute", "F0", 0.0, 1.0),
        Span(2, 0, 0, "bubble", "bubble", 1.0, 5.0),
        Span(3, 0, 0, "compute", "F0", 5.5, 6.5),
        Span(3, 0, 0, "bubble", "bubble", 6.5, 10.5),
        Span(2, 0, 1, "compute", "F0", 0.0, 2.0),
        Span(2, 0, 1, "bubble", "bubble", 2.0, 6.0),
        Span(3, 0, 1, "compute", "F0", 6.5, 8.5),
        Span(3, 0, 1, "bubble", "bubble", 8.5, 12.5),
    ]


def test_a_part_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "trace" / "steps-2-3.rank-1").mkdir(parents=True)
    world: LocalWorld[str] = LocalWorld(2)

    def failure(rank: int) -> str:
        with pytest.raises(OutputError) as error:
            play(rank, world, tmp_path)
        return str(error.value)

    for told in world.run(failure):
        assert "rank-1: the trace cannot be written (Is a directory)" in told


def test_no_rank_sends_its_spans(tmp_path: Path) -> None:
    world: LocalWorld[int] = LocalWorld(2)

    def sent(rank: int) -> int:
        return play(rank, world, tmp_path, actions=200).world.bytes_sent

    assert max(world.run(sent)) < 1000
