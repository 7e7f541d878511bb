"""Exchanges between ranks, and how they end."""

from __future__ import annotations

import pytest

from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.exchange import leave_together, sum_of, text_of_first, together
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


def endings(*ends: str) -> list[str]:
    """The end of each rank: one "leaves", the others work together, of which one "fails"."""

    def fail() -> None:
        raise DataError("no data here")

    def body(rank: int) -> str:
        transport = LocalTransport(world, rank)
        try:
            if ends[rank] == "leaves":
                leave_together(transport)
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
    ("ends", "first"), [(("works", "leaves", "leaves"), 1), (("leaves", "works"), 0)]
)
def test_a_rank_that_leaves_while_others_work_is_named_on_all(
    ends: tuple[str, ...], first: int
) -> None:
    said = (
        f"rank {first}: has ended, and other ranks wait for it; make a Trainer on every rank of "
        "the job, or on none"
    )

    assert endings(*ends) == [said] * len(ends)


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
