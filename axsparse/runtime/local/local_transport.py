"""The transport of ranks that are threads of one process.

Links and collectives are imported when they are made, since they need torch, which commands that
answer at once do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from axsparse.runtime.communication import Backoff, Collective, Link
from axsparse.runtime.grid import Place
from axsparse.runtime.local.local_world import LocalWorld, TurnBackoff
from axsparse.runtime.process_exit import exit_process

Local = TypeVar("Local", bound="LocalTransport")


class LocalTransport:
    """One rank of a `LocalWorld`; in a world of one rank, a run in one process without MPI."""

    name = "local"

    def __init__(self, world: LocalWorld[Any], rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.backoff: Backoff = TurnBackoff(world, rank)
        self._local = world
        self.world: Collective = self.collective("world", range(world.size))

    def link(self, place: Place) -> Link:
        from axsparse.runtime.local.local_link import LocalLink

        return LocalLink(self._local, place)

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        from axsparse.runtime.local.local_collective import LocalCollective

        return LocalCollective(self._local, name, tuple(ranks), self.rank)

    def branch(self: Local) -> Local:
        return self  # a branch would have nothing of its own to close

    def abort(self, code: int) -> NoReturn:
        exit_process(code)

    def close(self) -> None:
        """Do nothing, since nothing is held."""
