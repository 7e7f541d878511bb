"""What a supervisor decides: hosts and layouts, who is at fault, and whether to go on."""

from __future__ import annotations

import pytest

from axsparse.runtime.restarts.decision import (
    Demand,
    End,
    Fault,
    Host,
    Patience,
    Sign,
    fault,
    have_left,
    missing,
    place,
    preferred,
    refusal,
    start_fault,
    step_of,
)
from axsparse.runtime.restarts.lifeline import (
    BUILDS,
    ENDS,
    GONE,
    JOINS,
    RUNS,
    STARTS,
    STEPS,
    STOPPED,
    TRAINS,
    Beat,
)

FOUR = [Host(name, 2) for name in "abcd"]


AUTO = ("layout.g_inter=auto", "layout.g_data=auto", "layout.split=auto")


def shape(demand: Demand, hosts: list[Host], stages: int | None) -> tuple[str, tuple[str, ...]]:
    """The hosts with their ranks as "a2 b1", and the settings."""
    placing = place(demand, hosts, stages)
    assert placing is not None
    return " ".join(f"{host.name}{host.slots}" for host in placing.hosts), placing.settings


# -- hosts and layouts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "hosts", "stages", "expected"),
    [
        # All that was asked for, with a spare host.
        (Demand(6, 12), FOUR, None, ("a2 b2 c2", ())),
        # The spare host takes the place of one that is away.
        (Demand(6, 12), [FOUR[0], *FOUR[2:]], 2, ("a2 c2 d2", ())),
        # The planner's stages, and as many replicas as fit.
        (Demand(8, 12), FOUR[1:], 2, ("b2 c2 d2", ())),
        (Demand(8, 12), FOUR[1:], 4, ("b2 c2", ())),
        (Demand(8, 12), FOUR[:1], 2, ("a2", ())),
        # No more replicas than microbatches.
        (Demand(8, 2), FOUR[1:], 2, ("b2 c2", ())),
        # The user's stages are kept while they fit; then the planner chooses anew.
        (Demand(8, 12, g_inter=4), FOUR[1:], None, ("b2 c2", ())),
        (
            Demand(8, 12, g_inter=4),
            FOUR[:1],
            None,
            ("a2", AUTO),
        ),
        # Replicas that the user has fixed become fewer, of the same stages.
        (Demand(8, 12, g_data=4), FOUR[1:], None, ("b2 c2 d2", ("layout.g_data=3",))),
        (Demand(8, 12, g_inter=2, g_data=4), FOUR[2:], None, ("c2 d2", ("layout.g_data=2",))),
        # Nobody knows the stages yet.
        (Demand(8, 12), FOUR[1:], None, ("b2 c2 d2", ())),
        (Demand(8, 1), FOUR[1:], None, ("b2", ())),
        (Demand(7, 4), [Host("a", 5)], None, ("a4", ())),
        # Stages keep their members: three, of which five ranks give one stage, and nine two.
        (Demand(12, 4, g_tensor=3), [Host("a", 5)], 2, ("a3", AUTO)),
        (Demand(12, 4, g_tensor=3), [Host("a", 5), Host("b", 4)], None, ("a5 b4", ())),
        (Demand(12, 4, g_tensor=3), [Host("a", 5), Host("b", 4)], 2, ("a5 b1", ())),
        (Demand(12, 4, g_data=2, g_tensor=3), FOUR, None, ("a2 b2 c2", ("layout.g_data=1",))),
        (Demand(8, 1, g_tensor=2), FOUR, None, ("a2 b2 c2 d2", ())),
    ],
)
def test_ranks_are_placed_on_the_hosts_that_are_there(
    demand: Demand, hosts: list[Host], stages: int | None, expected: tuple[str, tuple[str, ...]]
) -> None:
    assert shape(demand, hosts, stages) == expected


def test_without_a_host_nothing_can_be_placed() -> None:
    assert place(Demand(8, 12), []) is None
    assert place(Demand(8, 12, g_tensor=4), FOUR[:1]) is None


def test_hosts_at_fault_are_left_out_unless_no_other_is_there() -> None:
    assert [host.name for host in preferred(FOUR, ["b", "d"])] == ["a", "c"]
    assert [host.name for host in preferred(FOUR[:1], ["a"])] == ["a"]


def test_each_rank_has_a_host_in_the_order_of_the_hosts() -> None:
    placing = place(Demand(3, 12), FOUR)

    assert placing is not None
    assert placing.host_of == ("a", "a", "b")


# -- who is at fault --------------------------------------------------------------------

HOST_OF = ("a", "a", "b", "b")
NOW = 100.0


def sign(
    rank: int, ago: float, process: str = RUNS, phase: str = STEPS, ran_ago: float | None = None
) -> Sign:
    ran_at = NOW - (ago if ran_ago is None else ran_ago)
    return Sign(Beat("t", 0, rank, process, phase, 7), NOW - ago, ran_at)


def found(*signs: Sign, began: float = 90.0) -> Fault | None:
    return fault(HOST_OF, {one.beat.rank: one for one in signs}, NOW, began, Patience())


def test_a_run_whose_ranks_all_live_has_no_fault() -> None:
    assert found(*(sign(rank, 4.9) for rank in range(4))) is None


def test_without_any_sign_the_launcher_alone_decides() -> None:
    assert found(began=0.0) is None


@pytest.mark.parametrize(
    ("signs", "waited", "joined_for", "said"),
    [
        ({}, 59.0, None, None),
        ({}, 61.0, None, "no rank has started for 61 s"),
        ({}, None, None, None),  # datagrams may not arrive at all
        ({0: JOINS, 1: JOINS}, 400.0, 119.0, None),
        ({0: JOINS, 1: BUILDS}, 400.0, 121.0, "MPI has not started for 121 s"),
        ({0: JOINS}, 400.0, 121.0, None),  # another one has not come so far
        ({0: BUILDS, 1: TRAINS}, 400.0, 121.0, None),
    ],
)
def test_a_start_that_gets_nowhere_is_ended(
    signs: dict[int, str], waited: float | None, joined_for: float | None, said: str | None
) -> None:
    heard = {
        rank: Sign(Beat("t", 0, rank, RUNS, phase, 0), NOW, NOW) for rank, phase in signs.items()
    }

    found = start_fault(2, heard, Patience(), waited, joined_for)

    assert found == (None if said is None else Fault(said))


def test_a_host_of_which_no_rank_is_heard_is_left_out() -> None:
    silent = found(sign(0, 0.5), sign(1, 0.5), sign(2, 9.0), sign(3, 5.2))

    assert silent == Fault("host b silent for 5.2 s", ("b",))


def test_a_host_of_which_one_rank_was_heard_lately_is_waited_for() -> None:
    assert found(sign(0, 0.5), sign(1, 0.5), sign(2, 5.4), sign(3, 4.9)) is None


def test_hosts_may_take_longer_for_their_first_sign() -> None:
    heard = (sign(0, 0.5), sign(1, 0.5))

    assert found(*heard, began=NOW - 59.0) is None
    assert found(*heard, began=NOW - 61.0) == Fault("host b silent for 61.0 s", ("b",))


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (sign(3, 0.5, STOPPED, ran_ago=5.1), "rank 3 on host b is stopped by a signal"),
        (sign(3, 5.1), "rank 3 on host b is silent, unlike others there"),
        (sign(3, 5.1, GONE), "rank 3 on host b has ended, and others wait"),
        (sign(3, 4.9, GONE), None),
        (sign(3, 4.9, STOPPED, ran_ago=4.9), None),
        # Ranks leave one after the other.
        (sign(3, 50.0, GONE, ENDS), None),
    ],
)
def test_one_rank_ends_the_attempt_and_its_host_is_not_left_out(
    odd: Sign, said: str | None
) -> None:
    assert found(*(sign(rank, 0.5) for rank in range(3)), odd) == (said and Fault(said))


def test_hosts_that_do_not_tell_of_the_end_of_their_ranks_are_missing() -> None:
    heard = {0: sign(0, 0.5, GONE), 1: sign(1, 3.0), 2: sign(2, 3.0), 3: sign(3, 3.0)}

    assert missing(HOST_OF, heard) == ["b"]
    assert missing(HOST_OF, {}) == []


def test_ranks_have_left_once_each_said_so() -> None:
    assert have_left({0: sign(0, 0.5, GONE, ENDS), 1: sign(1, 0.5, RUNS, ENDS)})
    assert not have_left({0: sign(0, 0.5, GONE, ENDS), 1: sign(1, 0.5, GONE, STEPS)})


# -- whether to go on -------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 65, 66, 74, 75, 78, 130])
def test_what_is_done_or_would_only_happen_again_ends_without_words(code: int) -> None:
    assert refusal(End(code), None, left=3) == ""


@pytest.mark.parametrize("code", [1, 9, 70, 137, 255])
def test_other_ends_are_started_again_while_restarts_are_left(code: int) -> None:
    assert refusal(End(code, 7), None, left=1) is None
    assert refusal(End(code, 7), None, left=0) == "no restart is left"


def test_the_same_end_after_the_same_step_is_the_programs_own() -> None:
    assert refusal(End(70, 7), End(70, 7), left=3) == "the same happened before, after step 7"


@pytest.mark.parametrize(
    ("end", "before"),
    [
        (End(70, 8), End(70, 7)),
        (End(9, 7), End(70, 7)),
        (End(70), End(70)),  # nothing is known of the steps
        (End(70, 7, Fault("host b silent", ("b",)), ("b",)), End(70, 7)),
        (End(70, 7), End(70, 7, None, ("b",))),
    ],
)
def test_other_steps_codes_and_hosts_at_fault_are_no_repetition(end: End, before: End) -> None:
    assert refusal(end, before, left=3) is None


def test_steps_count_once_a_rank_trains() -> None:
    assert step_of({0: sign(0, 1.0), 1: sign(1, 1.0, phase=STARTS)}) == 7
    assert step_of({0: sign(0, 1.0, phase=TRAINS)}) == 7
    assert step_of({0: sign(0, 1.0, phase=STARTS)}) is None
