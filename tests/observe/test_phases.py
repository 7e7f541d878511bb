"""Every moment of a step belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.standin_device import Clock

from axsparse.observe.phases import PHASES, Phases


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


def test_a_step_may_begin_and_end_within_a_block() -> None:
    clock = Clock()
    phases = Phases(clock)

    with phases("data"):
        clock.now += 1
        phases.begin_step()
        clock.now += 2
        seconds = phases.end_step()

    assert seconds == times(data=2)


def test_an_unknown_phase_and_a_step_that_never_began_are_mistakes() -> None:
    phases = Phases()
    with pytest.raises(KeyError, match="compile"):
        phases("compile")
    phases.begin_step()
    assert phases.end_step()["step"] >= 0, "the default clock runs forward"

    with pytest.raises(AssertionError, match="end_step without begin_step"):
        phases.end_step()


def test_the_phase_under_way_can_be_asked_for() -> None:
    phases = Phases(Clock())

    with phases("compute"), phases("compress"):
        inner = phases.current

    assert (inner, phases.current) == ("compress", "other")


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


@given(st.lists(st.tuples(st.sampled_from((*PHASES, "leave")), st.floats(0, 1e3)), max_size=40))
def test_phases_add_up_to_the_step_however_blocks_nest(moves: list[tuple[str, float]]) -> None:
    clock = Clock()
    phases = Phases(clock)
    blocks = ExitStack()

    phases.begin_step()
    for move, seconds in moves:
        if move == "leave":
            blocks.pop_all().close()
        else:
            blocks.enter_context(phases(move))
        clock.now += seconds
    result = dict(phases.end_step())

    step = result.pop("step")
    assert step == clock.now - 100.0
    assert sum(result.values()) == pytest.approx(step, rel=1e-12, abs=1e-9)
