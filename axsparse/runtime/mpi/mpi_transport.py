"""The transport of ranks that are processes of an MPI job.

mpi4py and what needs it are imported where they are used, since importing it starts MPI, which
many commands do without, and torch likewise.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from axsparse.runtime.communication import (
    MAX_CALL_BYTES,
    Backoff,
    Closable,
    Collective,
    Direction,
    Link,
)
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.machine import SleepingBackoff, own_share, share_cores
from axsparse.runtime.process import (
    LAUNCHER_VARIABLES,
    SIZE_VARIABLES,
    exit_at_once,
    flush_streams,
    forget_ways_out,
)
from axsparse.runtime.shared_segments import remove_own

if TYPE_CHECKING:
    from mpi4py import MPI

    from axsparse.runtime.host_channel import HostChannel, Way
    from axsparse.runtime.mpi.mpi_communication import MpiChannels

START_SECONDS = 600.0
"""How long a rank waits for all others to start MPI. MPICH's mpirun does not notice a process
that ends before it has started MPI, and all others would wait for ever."""
NOTICE_SECONDS = 30.0
"""How long it waits before it says so."""
_SPEAKER = """
import select, sys
for number in (1, 2):
    if select.select([0], [], [], float(sys.argv[number]))[0]:
        break
    sys.stderr.write(f"axsparse: {sys.argv[number + 2]}\\n")
    sys.stderr.flush()
"""
"""A program that writes a line after some seconds, and another later, until its stdin closes."""
SPEAKERS = ("0", "1")
"""The ranks that say that they wait: rank 1 where rank 0 is missing."""
FORWARDED_SECONDS = 0.3
"""How long a launcher has to pass on a last line. It drops output that it has not read by the
abort, as MPICH's did on a machine with more to do than cores."""


class MpiTransport:
    """The ranks of an MPI job."""

    max_call_bytes = MAX_CALL_BYTES
    """No call of MPI carries more to a rank, the same number on all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """All ranks of `comm` call this together."""
        from mpi4py import MPI

        from axsparse.runtime.mpi.mpi_communication import MpiCollective

        self.name = f"mpi ({mpi_library()})"
        self.rank = comm.rank
        self.size = comm.size
        here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank: int = here.rank
        """The number of this rank on its host."""
        shares_core = share_cores(here.allgather(own_share()))
        here.Free()
        self.backoff: Backoff = SleepingBackoff(shares_core=shares_core)
        self._comm = comm
        self._world = MpiCollective(comm, self.backoff, self.max_call_bytes)
        self.world: Collective = self._world
        self._made: list[Closable] = [self._world]

    def link(self, coords: RankCoords) -> Link:
        from axsparse.runtime.host_channel import ChannelLink, Direct

        channels = self.channels()

        def ends(direction: Direction, source: int, target: int) -> tuple[HostChannel, Way]:
            channel = channels.channel(direction, source, target)
            return channel, Direct(channel, self.max_call_bytes)

        link = ChannelLink(coords, ends, self.backoff)
        self._made += [channels, link]  # the link is closed first
        return link

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        from axsparse.runtime.mpi.mpi_communication import MpiCollective

        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create_group(group)
        comm.Set_name(name)  # what MPI's own messages and debuggers call it
        group.Free()
        collective = MpiCollective(comm, self.backoff, self.max_call_bytes)
        comm.Free()  # the collective has its own duplicates
        self._made.append(collective)
        return collective

    def channels(self) -> MpiChannels:
        """The channels of a new link between GPUs; all ranks call this together."""
        from axsparse.runtime.mpi.mpi_communication import MpiChannels

        return MpiChannels(self._comm, self.backoff)

    def branch(self) -> MpiTransport:
        branch = copy.copy(self)
        branch._made = []
        self._made.append(branch)
        return branch

    def abort(self, code: int) -> NoReturn:
        end_all_ranks(self._comm, code)

    def close(self) -> None:
        for each in reversed(self._made):
            each.close()
        self._made.clear()


def end_all_ranks(comm: MPI.Intracomm, code: int) -> NoReturn:
    """End the job with this exit code, and silently, since its last line has been printed."""
    from mpi4py import MPI

    flush_streams()
    remove_own()
    time.sleep(FORWARDED_SECONDS)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    forget_ways_out()  # this is one, and MPICH's ends by C's exit
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        comm.Abort(code)
    exit_at_once(code)  # the launcher ends the others


def wait_until_all_ranks_have_started() -> None:
    """Start MPI; after `START_SECONDS` this process ends, with a line or with a traceback."""
    if "mpi4py.MPI" in sys.modules:
        return
    rank = next((os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ), "")
    with _announced_wait(rank), Path(os.devnull).open("w") as nowhere:
        out = nowhere if rank in SPEAKERS else sys.stderr
        # Its timer is a thread of C, which runs while MPI holds the interpreter.
        faulthandler.dump_traceback_later(START_SECONDS + 2.0, exit=True, file=out)
        try:
            from mpi4py import MPI  # noqa: F401 - importing it starts it
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _announced_wait(rank: str) -> Iterator[None]:
    """Say meanwhile, by another process, that this rank waits for others to start MPI."""
    if rank not in SPEAKERS:
        yield
        return
    import subprocess  # a hundredth of a second, which commands without ranks do not need

    sizes = (f"{os.environ[name]} " for name in SIZE_VARIABLES if name in os.environ)
    ranks = f"all {next(sizes, '')}ranks"
    who = f"rank {rank} on {socket.gethostname()}"
    lines = [
        f"{who} waits for {ranks} to start MPI, as a first Trainer does; after "
        f"{START_SECONDS:g} s the job ends",
        f"error: {who}: not {ranks} have started MPI within {START_SECONDS:g} s; see what the "
        "missing ones do before their first Trainer",
    ]
    seconds = (str(NOTICE_SECONDS), str(START_SECONDS - NOTICE_SECONDS))
    speaker: AbstractContextManager[object] = nullcontext()
    with suppress(OSError):  # the limit of processes may be reached
        speaker = subprocess.Popen(  # noqa: S603 - the program is ours
            [sys.executable, "-IS", "-c", _SPEAKER, *seconds, *lines],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    with speaker:
        yield


def mpi_library() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(str(part) for part in version)}"
