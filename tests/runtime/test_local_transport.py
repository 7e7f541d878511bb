"""The contracts of `Link` and `Collective`, in one process; `tests/mpi` runs them over MPI."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.collective_contract import CONTRACT as COLLECTIVE_CONTRACT
from support.link_contract import CONTRACT

from axsparse.runtime.communication import Direction, Message, Op, Transport
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport, LocalWorld
from axsparse.runtime.seeds import preserved_rng, seed_all


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_local_link_keeps_the_contract(
    promise: Callable[[Transport], None], ranks: int, order: int | None
) -> None:
    world: LocalWorld[None] = LocalWorld(ranks, seed=order)

    world.run(lambda rank: promise(LocalTransport(world, rank)))


def test_a_seeded_world_permutes_arrivals_across_directions_and_never_within_one() -> None:
    seen = {_arrivals_in_the_middle(order) for order in range(20)}

    assert len(seen) > 5
    # Also among the messages that one call returns.
    assert any(re.search(r"F\d B\d", text) for text in seen)
    assert any(re.search(r"B\d F\d", text) for text in seen)
    for text in seen:
        forwards = [name for name in text.split() if name.startswith("F")]
        backwards = [name for name in text.split() if name.startswith("B")]
        assert (forwards, backwards) == (["F0", "F1", "F2"], ["B0", "B1", "B2"])


@pytest.mark.parametrize("order", [None, *range(5)])
def test_ranks_that_wait_for_each_other_draw_as_if_they_were_alone(order: int | None) -> None:
    of_numpy: Any = np.random
    before = of_numpy.get_bit_generator()
    world: LocalWorld[bool] = LocalWorld(3, seed=order)

    def draws(rank: int, pause: Callable[[], object]) -> list[float]:
        found = []
        with preserved_rng():
            seed_all("rank", rank)
            for _ in range(4):
                found += [torch.rand(()).item(), random.random(), np.random.random()]  # noqa: S311
                pause()
        return found

    def main(rank: int) -> bool:
        return draws(rank, lambda: world.pass_turn(rank)) == draws(rank, lambda: None)

    assert world.run(main) == [True] * 3
    assert of_numpy.get_bit_generator() is before


@pytest.mark.parametrize(("rank", "direction"), [(0, Direction.BACKWARD), (1, Direction.FORWARD)])
def test_a_message_to_no_neighbour_is_an_internal_error(rank: int, direction: Direction) -> None:
    world: LocalWorld[None] = LocalWorld(2)
    link = LocalTransport(world, rank).link(Grid(2, 1).coords(rank))

    with pytest.raises(AssertionError, match="no such neighbour"):
        link.send(Message(direction, 0, (torch.zeros(1),)))


def _arrivals_in_the_middle(order: int | None) -> str:
    """The arrivals at the middle of three stages in each call, both neighbours sending three
    messages."""
    world: LocalWorld[str] = LocalWorld(3, seed=order)

    def main(rank: int) -> str:
        transport = LocalTransport(world, rank)
        link = transport.link(Grid(3, 1).coords(rank))
        calls: list[str] = []
        if rank != 1:
            direction = Direction.FORWARD if rank == 0 else Direction.BACKWARD
            for number in range(3):
                link.send(Message(direction, number, ()))
            return ""
        while sum(len(call.split()) for call in calls) < 6:
            seen = [f"{m.direction.name[0]}{m.microbatch}" for m in link.arrivals()]
            calls.append(" ".join(seen))
            transport.backoff.pause()
        return " | ".join(calls)

    return world.run(main)[1]


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("promise", COLLECTIVE_CONTRACT, ids=lambda promise: promise.__name__)
def test_a_local_collective_keeps_the_contract(
    promise: Callable[[Transport], None], ranks: int, order: int | None
) -> None:
    world: LocalWorld[None] = LocalWorld(ranks, seed=order)

    world.run(lambda rank: promise(LocalTransport(world, rank)))


def test_members_that_start_different_operations_are_an_internal_error() -> None:
    world: LocalWorld[None] = LocalWorld(2)

    def main(rank: int) -> None:
        group = LocalTransport(world, rank).world
        group.start(Op.BROADCAST if rank else Op.ALL_REDUCE, torch.zeros(3))

    with pytest.raises(AssertionError, match="members disagree"):
        world.run(main)
