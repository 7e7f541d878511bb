"""Exchanges between ranks, and how they end."""

from __future__ import annotations

import pytest

from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.exchange import leave_together, meet, sum_of, text_of_first, together
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


def endings(*ends: str) -> list[str]:
    """The end of each rank: one "leaves", the others work together, of which one "fails", or make
    a call."""

    def fail() -> None:
        raise DataError("no data here")

    def body(rank: int) -> str:
        transport = LocalTransport(world, rank)
        try:
            if ends[rank] == "leaves":
                leave_together(transport)
            elif ends[rank].startswith("calls"):
                assert meet(transport, ends[rank], value=rank) == sum(range(len(ends)))
            else:
                together(transport, fail if ends[rank] == "fails" else lambda: None)
        except (ConfigError, DataError) as error:
            return str(error) if error.on_all_ranks else "fails alone"
        return ""

    world: LocalWorld[str] = LocalWorld(len(ends))
    return world.run(body)


def test_ranks_that_all_leave_part_without_a_word() -> None:
    assert endings("leaves", "leaves", "leaves") == [""] * 3


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("works", "leaves", "leaves"), "rank 1 has ended, and rank 0 is in the middle of a call"),
        (("leaves", "works"), "rank 1 is in the middle of a call, and rank 0 has ended"),
        (("calls a", "calls a", "calls b"), "rank 2 calls b, and rank 0 calls a"),
        (("calls a", "leaves"), "rank 1 has ended, and rank 0 calls a"),
    ],
)
def test_ranks_that_do_different_things_are_named_on_all(ends: tuple[str, ...], said: str) -> None:
    rule = (
        "make the same trainers on all ranks, and the same calls of them in the same order "
        "(`if trainer.rank == 0` is for what no other rank does)"
    )

    assert endings(*ends) == [f"{said}; {rule}"] * len(ends)


def test_ranks_that_make_the_same_call_learn_the_sum_of_their_values() -> None:
    assert endings(*["calls a"] * 3) == [""] * 3


def test_a_failure_of_a_rank_before_it_is_what_all_raise() -> None:
    assert endings("fails", "leaves") == ["no data here"] * 2


@pytest.mark.parametrize("text", ["", "two words", "Grüße", "a\udcff name that is no UTF-8"])
def test_all_ranks_learn_the_text_of_the_first(text: str) -> None:
    world: LocalWorld[str] = LocalWorld(3)

    def body(rank: int) -> str:
        return text_of_first(LocalTransport(world, rank), text if rank == 0 else "another")

    assert world.run(body) == [text] * 3


def test_ranks_learn_how_many_of_them_there_are() -> None:
    world: LocalWorld[list[float]] = LocalWorld(3)

    def body(rank: int) -> list[float]:
        return sum_of(LocalTransport(world, rank), [1.0, rank])

    assert world.run(body) == [[3.0, 3.0]] * 3


def bytes_sent(ranks: int) -> int:
    """Bytes that all ranks together hand over to do some work together and read one text."""
    world: LocalWorld[int] = LocalWorld(ranks)

    def body(rank: int) -> int:
        transport = LocalTransport(world, rank)
        together(transport, lambda: None)
        text_of_first(transport, "the same for all")
        return transport.world.bytes_sent

    return sum(world.run(body))


def test_what_every_start_exchanges_grows_no_faster_than_the_ranks() -> None:
    assert bytes_sent(33) == 32 * bytes_sent(2)
