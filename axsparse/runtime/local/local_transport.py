"""The transport of a run in one process, without MPI: one rank, which has nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from axsparse.runtime.communication import Backoff, Collective, Link, Message, Op
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.machine import SleepingBackoff
from axsparse.runtime.process import exit_process

if TYPE_CHECKING:
    from torch import Tensor


class LocalTransport:
    """The only rank of a job, whose pauses are for its GPU."""

    name = "local"
    rank, size = 0, 1

    def __init__(self) -> None:
        self.backoff: Backoff = SleepingBackoff()
        self.world: Collective = LocalCollective()

    def link(self, coords: RankCoords) -> Link:
        assert coords.grid.size == 1, f"{coords} has neighbours"
        return LocalLink()

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        assert list(ranks) == [0], f"{name} has other ranks: {list(ranks)}"
        return LocalCollective()

    def branch(self) -> LocalTransport:
        return self  # a branch would have nothing separate to close

    def abort(self, code: int) -> NoReturn:
        exit_process(code)

    def close(self) -> None:
        """Do nothing, since nothing is held."""


class LocalLink:
    """The link of a stage without neighbours."""

    bytes_sent, unsent = 0, 0

    def send(self, message: Message) -> None:
        raise AssertionError(f"no such neighbour: {message.direction.name}")

    def arrivals(self) -> list[Message]:
        return []

    def push(self) -> None:
        """Do nothing, since nothing waits to be sent."""

    def close(self) -> None:
        """Do nothing, since nothing is held."""


class LocalCollective:
    """A group of one rank, in whose buffers all results are already; its own `Work`."""

    rank, size, bytes_sent = 0, 1, 0

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> LocalCollective:
        del op, bounds
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        return self

    def poll(self) -> bool:
        return True
