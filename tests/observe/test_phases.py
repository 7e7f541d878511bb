"""Every moment of a step belongs to exactly one phase."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axsparse.observe.phases import PHASES, Phases


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def times(**seconds: float) -> dict[str, float]:
    """The result of a step whose other phases are zero."""
    return {**dict.fromkeys(PHASES, 0.0), **seconds, "step": sum(seconds.values())}


def test_time_in_a_block_belongs_to_its_phase_and_time_outside_to_other() -> None:
    clock = Clock()
    phases = Phases(clock)

    phases.begin_step()
    clock.advance(1)
    with phases("compute"):
        clock.advance(2)
    clock.advance(4)

    assert phases.end_step() == times(compute=2, other=5)


def test_a_nested_block_interrupts_the_outer_one_which_then_resumes() -> None:
    clock = Clock()
    phases = Phases(clock)

    phases.begin_step()
    with phases("compute"):
        clock.advance(1)
        with phases("compress"):
            clock.advance(2)
        clock.advance(4)

    assert phases.end_step() == times(compute=5, compress=2)


def test_a_phase_may_be_nested_in_itself() -> None:
    clock = Clock()
    phases = Phases(clock)

    phases.begin_step()
    with phases("p2p"), phases("bubble"), phases("p2p"):
        clock.advance(1)
    clock.advance(2)

    assert phases.end_step() == times(p2p=1, other=2)


def test_an_exception_leaves_its_block_and_passes_on() -> None:
    clock = Clock()
    phases = Phases(clock)

    def fail() -> None:
        with phases("compress"):
            clock.advance(1)
            raise ZeroDivisionError

    phases.begin_step()
    with phases("compute"):
        with pytest.raises(ZeroDivisionError):
            fail()
        clock.advance(2)

    assert phases.end_step() == times(compress=1, compute=2)


def test_each_step_starts_at_zero() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.begin_step()
    with phases("data"):
        clock.advance(1)
    phases.end_step()

    phases.begin_step()
    clock.advance(2)

    assert phases.end_step() == times(other=2)


def test_blocks_and_time_between_steps_count_for_no_step() -> None:
    clock = Clock()
    phases = Phases(clock)
    with phases("compute"):
        clock.advance(1)
    clock.advance(2)

    phases.begin_step()
    clock.advance(4)

    assert phases.end_step() == times(other=4)


def test_a_step_may_begin_and_end_within_a_block() -> None:
    clock = Clock()
    phases = Phases(clock)

    with phases("data"):
        clock.advance(1)
        phases.begin_step()
        clock.advance(2)
        seconds = phases.end_step()

    assert seconds == times(data=2)


def test_an_unknown_phase_is_refused_before_its_block_is_entered() -> None:
    phases = Phases(Clock())

    with pytest.raises(KeyError, match="compile"):
        phases("compile")


def test_a_step_that_never_began_cannot_end() -> None:
    phases = Phases(Clock())
    phases.begin_step()
    phases.end_step()

    with pytest.raises(AssertionError, match="end_step without begin_step"):
        phases.end_step()


def test_the_default_clock_runs_forward() -> None:
    phases = Phases()

    phases.begin_step()

    assert phases.end_step()["step"] >= 0


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
        clock.advance(seconds)
    result = dict(phases.end_step())

    step = result.pop("step")
    assert step == clock.now - 100.0
    assert sum(result.values()) == pytest.approx(step, rel=1e-12, abs=1e-9)
