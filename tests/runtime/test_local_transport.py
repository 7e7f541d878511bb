"""The contracts of `Link` and `Collective`, in one process; `tests/mpi` runs them over MPI."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.collective_contract import CONTRACT as COLLECTIVE_CONTRACT
from support.link_contract import CONTRACT
from support.local_world import LocalWorld
from support.runs import on_ranks

from axsparse.runtime.communication import Direction, Message, Transport
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.seeds import preserved_rng, seed_all


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize(
    ("ranks", "promise"),
    [*itertools.product([2, 3], CONTRACT), *itertools.product([2, 3], COLLECTIVE_CONTRACT)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_local_links_and_collectives_keep_their_contracts(
    ranks: int, promise: Callable[[Transport], None], order: int | None
) -> None:
    on_ranks(ranks, promise, order)


@pytest.mark.parametrize("promise", COLLECTIVE_CONTRACT)
def test_one_rank_without_a_world_keeps_the_contract(promise: Callable[[Transport], None]) -> None:
    promise(LocalTransport())


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


def _arrivals_in_the_middle(order: int | None) -> str:
    """The arrivals at the middle of three stages in each call, both neighbours sending three
    messages."""

    def main(transport: Transport) -> str:
        link = transport.link(Grid(3, 1).coords(transport.rank))
        calls: list[str] = []
        if transport.rank != 1:
            direction = Direction.BACKWARD if transport.rank else Direction.FORWARD
            for number in range(3):
                link.send(Message(direction, number, ()))
            return ""
        while sum(len(call.split()) for call in calls) < 6:
            seen = [f"{m.direction.name[0]}{m.microbatch}" for m in link.arrivals()]
            calls.append(" ".join(seen))
            transport.backoff.pause()
        return " | ".join(calls)

    return on_ranks(3, main, order)[1]
