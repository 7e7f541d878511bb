"""The transports: MPI between processes, and turns within one process.

Links and collectives are imported when they are made, since commands that answer at once
read this file for its `LAUNCHER_VARIABLES`.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from axsparse.comm import Backoff, Collective, Link, Transport
from axsparse.errors import EXIT_INTERNAL, ConfigError
from axsparse.grid import Place
from axsparse.local import LocalWorld, TurnBackoff
from axsparse.waiting import SleepingBackoff

if TYPE_CHECKING:
    from mpi4py import MPI

    from axsparse.pipeline.wire_mpi import MpiWires

LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
"""Set in every process that an MPI launcher starts."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")
"""Ranks that the launcher of this process started: Open MPI's mpirun; MPICH's, and srun with a
PMI; jsrun."""
SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
"""Processes that srun started. With one of `SIZE_VARIABLES` beside it, these may be the daemons
of an mpirun, one a node; SLURM_NTASKS then says so, too."""
JOB_SIZE = "AXSPARSE_RANKS"
"""Ranks that a job script asked for (`axsparse submit`)."""


Local = TypeVar("Local", bound="LocalTransport")


FORWARDED_SECONDS = 0.3
"""How long a launcher has to pass on a last line. It drops what it has not read by the abort, as
MPICH's did on a machine with more to do than cores."""


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

    def branch(self: Local) -> Local:
        return self  # there is nothing to close

    def abort(self, code: int) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            _flush()
            os._exit(code)  # an exception would end the thread alone
        sys.exit(code)

    def close(self) -> None:
        """Nothing to release."""


class MpiTransport:
    """The ranks of an MPI job."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective over `comm`."""
        from axsparse.data_parallel.collective_mpi import MpiCollective

        self.name = f"mpi ({mpi_library()})"
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

    def wires(self) -> MpiWires:
        """What the headers between GPUs travel on; all ranks call this together."""
        from axsparse.pipeline.wire_mpi import MpiWires

        return MpiWires(self._comm)

    def branch(self) -> MpiTransport:
        branch = copy.copy(self)
        branch._made = []
        self._made.append(branch)
        return branch

    def local_rank(self) -> int:
        """Which of its host's ranks this is; all ranks call this together."""
        from mpi4py import MPI

        here = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        number: int = here.rank
        here.Free()
        return number

    def abort(self, code: int) -> NoReturn:
        _end_all(self._comm, code)

    def close(self) -> None:
        for made in reversed(self._made):
            made.close()
        self._made.clear()


def _end_all(comm: MPI.Intracomm, code: int) -> NoReturn:
    """Our line has been printed; MPI's own words after it would only bury it."""
    _flush()
    time.sleep(FORWARDED_SECONDS)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or thread_level() == "multiple":
        comm.Abort(code)
    os._exit(code)  # the launcher ends the others


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def started_by_launcher() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def speaks() -> bool:
    """Whether this process is the one that speaks before MPI has started."""
    ranks = [os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ]
    if not ranks and SRUN_SIZE in os.environ:
        ranks = [os.environ.get("SLURM_PROCID", "0")]
    return all(rank == "0" for rank in ranks)


def check_size(size: int) -> None:
    """ConfigError if the launcher started another number of ranks than MPI has found.

    A launcher and an MPI library that do not know each other say nothing: each process
    finds itself alone and would train by itself, all of them into the same place.
    """
    names = [name for name in SIZE_VARIABLES if name in os.environ] or [SRUN_SIZE]
    for name in names:
        if (said := os.environ.get(name, str(size))) != str(size):
            raise ConfigError(
                f"MPI: size {size}, but {name} is {said}: launcher and MPI library do not know "
                "each other; start with the mpirun of the library that mpi4py loads, or with "
                "another srun --mpi (srun --mpi=list names them)"
            )
    if (asked := os.environ.get(JOB_SIZE, str(size))) != str(size):
        raise ConfigError(
            f"MPI: size {size}, but the job asked for {asked} ranks ({JOB_SIZE}); start as many"
        )


START_SECONDS = 600.0
"""How long a rank waits for all others to start MPI. MPICH's mpirun does not notice a process
that ends before it has, and whoever has would wait for ever."""


def _wait_until_all_ranks_have_started() -> None:
    """Start MPI. The name is what a traceback shows where a rank has waited too long."""
    if "mpi4py.MPI" in sys.modules:
        return
    # By a thread of C, since MPI holds the interpreter meanwhile.
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    try:
        from mpi4py import MPI  # noqa: F401 - importing it starts it
    finally:
        faulthandler.cancel_dump_traceback_later()


def cannot_start(reason: Exception) -> NoReturn:
    """End a job whose rank cannot load what it needs, such as a package that one host lacks."""
    text = " ".join(str(reason).split())
    where = f"host {socket.gethostname()}: {type(reason).__name__}"
    print(f"axsparse: error: {where}: {text}", file=sys.stderr, flush=True)
    if started_by_launcher():
        _wait_until_all_ranks_have_started()
        from mpi4py import MPI

        _end_all(MPI.COMM_WORLD, EXIT_INTERNAL)
    sys.exit(EXIT_INTERNAL)


def connect() -> Transport:
    """The transport of this process: MPI where there is an MPI library, else one rank by itself.

    Under a launcher MPI has to work: without it, every process would train alone. ConfigError
    if it does not, or has another size.
    """
    from axsparse.device import bind_early

    bind_early(os.environ)
    try:
        if started_by_launcher():
            _wait_until_all_ranks_have_started()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        if started_by_launcher():
            raise ConfigError(
                f"MPI: a launcher started this process, but mpi4py cannot load an MPI library "
                f"({reason}); load the site's MPI module, or install axsparse[mpich]"
            ) from reason
        check_size(1)
        return LocalTransport(LocalWorld(1), 0)
    check_size(MPI.COMM_WORLD.size)
    return MpiTransport(MPI.COMM_WORLD)


def mpi_library() -> str:
    """Vendor and version of the MPI library."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(str(part) for part in version)}"


def thread_level() -> str:
    """How many threads may call MPI: single, funneled, serialized or multiple."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return levels[MPI.Query_thread()]
