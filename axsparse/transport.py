"""The transports: MPI between processes, and turns within one process.

Links and collectives are imported when they are made, since commands that answer at once
read this file for its `LAUNCHER_VARIABLES`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from axsparse.comm import Backoff, Collective, Link, Transport
from axsparse.errors import ConfigError
from axsparse.grid import Place
from axsparse.local import LocalWorld, TurnBackoff
from axsparse.waiting import SleepingBackoff

if TYPE_CHECKING:
    from mpi4py import MPI

LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Set in every process that an MPI launcher starts."""


class _Closable(Protocol):
    def close(self) -> None: ...


class LocalTransport:
    """One rank of a `LocalWorld`; by itself, a run in one process without MPI."""

    name = "local"

    def __init__(self, world: LocalWorld[Any], rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.backoff: Backoff = TurnBackoff(world, rank)
        self._local = world
        self.world: Collective = self.collective("world", range(world.size))

    def link(self, place: Place) -> Link:
        from axsparse.pipeline.link_local import LocalLink

        return LocalLink(self._local, place)

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        from axsparse.data_parallel.collective_local import LocalCollective

        return LocalCollective(self._local, name, tuple(ranks), self.rank)

    def abort(self, code: int) -> NoReturn:
        sys.exit(code)

    def close(self) -> None:
        """Nothing to release."""


class MpiTransport:
    """The ranks of an MPI job."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective over `comm`."""
        from axsparse.data_parallel.collective_mpi import MpiCollective

        self.name = f"mpi ({_library_name()})"
        self.rank = comm.rank
        self.size = comm.size
        self.backoff: Backoff = SleepingBackoff()
        self._comm = comm
        self._world = MpiCollective(comm, self.backoff)
        self.world: Collective = self._world
        self._made: list[_Closable] = [self._world]

    def link(self, place: Place) -> Link:
        from axsparse.pipeline.link_mpi import MpiLink

        link = MpiLink(self._comm, place, self.backoff)
        self._made.append(link)
        return link

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        from axsparse.data_parallel.collective_mpi import MpiCollective

        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create_group(group)
        comm.Set_name(name)  # what MPI's own messages and debuggers call it
        group.Free()
        collective = MpiCollective(comm, self.backoff)
        comm.Free()  # the collective has its own duplicates
        self._made.append(collective)
        return collective

    def abort(self, code: int) -> NoReturn:
        """Our line has been printed; MPI's own words after it would only bury it."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        self._comm.Abort(code)
        os._exit(code)

    def close(self) -> None:
        for made in reversed(self._made):
            made.close()
        self._made.clear()


def started_by_launcher() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def speaks() -> bool:
    """Whether this process is the one that speaks before MPI has started."""
    return all(os.environ.get(name, "0") == "0" for name in LAUNCHER_VARIABLES)


def connect() -> Transport:
    """The transport of this process: MPI where there is an MPI library, else one rank by itself.

    Under a launcher MPI has to work: without it, every process would train alone.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        if started_by_launcher():
            raise ConfigError(
                f"MPI: a launcher started this process, but mpi4py cannot load an MPI library "
                f"({reason}); load the site's MPI module, or install axsparse[mpich]"
            ) from reason
        return LocalTransport(LocalWorld(1), 0)
    return MpiTransport(MPI.COMM_WORLD)


def _library_name() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(str(part) for part in version)}"
