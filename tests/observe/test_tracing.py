"""Steps of all ranks in one file, by a clock of our own."""

from __future__ import annotations

from pathlib import Path

from axsparse.grid import Grid
from axsparse.local import LocalWorld
from axsparse.observe.phases import Phases
from axsparse.observe.trace import Span, read
from axsparse.observe.tracing import Tracing
from axsparse.transport import LocalTransport


class Clock:
    """Moves when it is told to."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def play(rank: int, world: LocalWorld[None], folder: Path) -> None:
    """Four steps on a host whose clock shows anything; rank r computes r + 1 seconds."""
    clock = Clock(1000.0 * rank)
    transport, phases = LocalTransport(world, rank), Phases(clock)
    place = Grid(2, 1).place(rank)
    tracing = Tracing(transport, place, phases, folder, first=2, last=3, clock=clock)
    for step in range(1, 5):
        tracing.begin(step)
        phases.begin_step()
        phases.action = "F0"
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


def test_the_steps_asked_for_are_traced_on_all_ranks_from_one_zero(tmp_path: Path) -> None:
    world: LocalWorld[None] = LocalWorld(2)
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
