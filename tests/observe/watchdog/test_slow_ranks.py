"""A rank that computes for longer than its peers is warned of, once."""

from __future__ import annotations

from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.runtime.grid import Grid

WINDOW = 4


def slow_ranks(grid: Grid, *, work: list[float] | None = None) -> SlowRanks:
    hosts = [f"node{rank}" for rank in range(grid.size)]
    return SlowRanks(grid, work or [1.0] * grid.g_inter, hosts, ratio=1.5, steps=WINDOW)


def warnings(slow: SlowRanks, *seconds: list[float]) -> list[tuple[int, str]]:
    """The warnings after a first step and then one window for each entry of `seconds`."""
    said = [(1, slow.add(1, [100.0, *seconds[0][1:]]))]
    steps = [each for each in seconds for _ in range(WINDOW)]
    said += [(step, slow.add(step, each)) for step, each in enumerate(steps, 2)]
    return [(step, text) for step, text in said if text is not None]


def test_a_replica_is_held_against_the_others_of_its_stage() -> None:
    slow = slow_ranks(Grid(2, 3))

    found = warnings(slow, [1.0, 4.0, 1.0, 8.0, 1.0, 4.0])

    assert found == [
        (
            5,
            "warning: rank 3 (stage 1, replica 1) on host node3: computes 2.0 times as long as "
            "the other replicas of its stage (8 s a step against 4 s, steps 2 to 5); see what "
            "else runs there",
        )
    ]


def test_a_rank_that_is_slow_but_has_little_to_do_holds_nobody_up() -> None:
    slow = slow_ranks(Grid(2, 3))

    assert warnings(slow, [1.0, 8.0, 2.0, 8.0, 1.0, 7.0]) == []


def test_the_ratio_is_that_to_the_median_of_the_others() -> None:
    slow = slow_ranks(Grid(1, 4))

    ((step, text),) = warnings(slow, [1.0, 1.2, 3.0, 5.0])

    assert step == 5
    assert text == (
        "warning: rank 3 (stage 0, replica 3) on host node3: computes 4.2 times as long as the "
        "other replicas of its stage (5 s a step against 1.2 s, steps 2 to 5), and 1 more is slow; "
        "see what else runs there"
    )


def test_stages_without_replicas_are_compared_by_their_share_of_the_work() -> None:
    work = [1.0, 2.0, 4.0]

    ((_, text),) = warnings(slow_ranks(Grid(3, 1), work=work), [1.0, 3.5, 4.0])

    assert warnings(slow_ranks(Grid(3, 1), work=work), [1.0, 2.1, 4.2]) == []
    assert "rank 1 (stage 1, replica 0) on host node1: computes 1.8 times as long as its work" in (
        text
    )
    assert "takes elsewhere (3.5 s a step against 2 s" in text


def test_a_rank_alone_and_stages_without_work_are_compared_with_nobody() -> None:
    assert warnings(slow_ranks(Grid(1, 1)), [1.0], [9.0]) == []
    assert warnings(slow_ranks(Grid(2, 1), work=[0.0, 1.0]), [9.0, 1.0], [1.0, 9.0]) == []


def test_what_is_lost_in_the_noise_of_small_steps_is_not_told() -> None:
    assert warnings(slow_ranks(Grid(1, 2)), [0.01, 0.05]) == []
    assert len(warnings(slow_ranks(Grid(1, 2)), [0.01, 0.07])) == 1


def test_the_first_step_and_a_short_pause_are_not_counted() -> None:
    slow = slow_ranks(Grid(1, 2))

    said = [slow.add(step, [2.0 if step == 3 else 1.0, 1.0]) for step in range(2, 10)]

    assert said == [None] * 8


def test_a_rank_is_named_again_only_after_it_was_fast() -> None:
    slow = slow_ranks(Grid(1, 3))
    lame, fast = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]

    found = warnings(slow, lame, lame, lame, fast, lame)

    assert [step for step, _ in found] == [5, 21]


def test_another_rank_that_gets_slow_is_named_as_well() -> None:
    slow = slow_ranks(Grid(1, 4))

    found = warnings(slow, [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 2.5, 2.0])

    assert [text.split(" (")[0] for _, text in found] == ["warning: rank 3", "warning: rank 2"]
