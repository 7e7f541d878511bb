"""Chooses how this process reaches the other ranks: over MPI, or as the only rank of its job."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from typing import NoReturn

from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import EXIT_INTERNAL, ConfigError, one_line
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.mpi.mpi_transport import (
    MpiTransport,
    end_all_ranks,
    wait_until_all_ranks_have_started,
)
from axsparse.runtime.process import (
    SIZE_VARIABLES,
    SRUN_SIZE,
    check_size,
    exit_process,
    started_by_launcher,
    write_line,
)
from axsparse.runtime.shared_segments import remove_leftovers


def cannot_start(reason: Exception) -> NoReturn:
    """End the job, because this rank cannot load something, such as a missing package."""
    leave_before_start(f"host {socket.gethostname()}: {one_line(reason)}", EXIT_INTERNAL)


def leave_before_start(message: str, code: int) -> NoReturn:
    """Print an error and end the job with this exit code, before this rank has connected."""
    write_line(f"error: {message}")
    if started_by_launcher():
        wait_until_all_ranks_have_started()
        from mpi4py import MPI

        end_all_ranks(MPI.COMM_WORLD, code)
    exit_process(code)


def connect_alone() -> Transport:
    """The transport of this process by itself, without MPI. ConfigError if a launcher started
    several processes."""
    from axsparse.runtime.gpu.rank_gpus import bind_early

    for name in (*SIZE_VARIABLES, SRUN_SIZE):
        if (said := os.environ.get(name, "1")) != "1":
            raise ConfigError(
                f"Trainer: {said} processes were started ({name}), each an interactive session; "
                "start a program, as in: mpirun -n 4 python my_model.py"
            )
    bind_early(os.environ)
    remove_leftovers()
    return LocalTransport()


def connect() -> Transport:
    """The transport of this process: MPI if there is an MPI library, else one rank by itself.

    ConfigError if a launcher started this process and MPI does not work, since every process
    would then train alone; or if MPI finds another number of ranks than were started.
    """
    from axsparse.runtime.gpu.rank_gpus import bind_early, local_rank

    bind_early(os.environ)
    if not local_rank(os.environ):
        remove_leftovers()
    # UCX, below MPI, would take SIGHUP for itself.
    own = dict.fromkeys({"UCX_DEBUG_SIGNO"} - os.environ.keys(), "0")
    os.environ.update(own)
    try:
        import mpi4py

        # A fork of this process that exits would end MPI for it, which this process does alone.
        is_ours = "mpi4py.MPI" not in sys.modules
        mpi4py.rc.finalize = not is_ours
        if started_by_launcher():
            wait_until_all_ranks_have_started()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        if started_by_launcher():
            raise ConfigError(
                f"MPI: a launcher started this process, but mpi4py cannot load an MPI library "
                f"({reason}); load the site's MPI module, or install axsparse[mpich]"
            ) from reason
        check_size(1)
        return LocalTransport()
    finally:
        for name in own:  # it has been read
            os.environ.pop(name, None)
    if is_ours:
        atexit.register(end_mpi, os.getpid())
    check_size(MPI.COMM_WORLD.size)
    return MpiTransport(MPI.COMM_WORLD)


def end_mpi(process: int | None = None) -> None:
    """End MPI, if it runs, in the process that has started it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and process in (None, os.getpid()) and not mpi.Is_finalized():
        mpi.Finalize()


def mpi_has_ended() -> bool:
    """Whether the program has called `MPI.Finalize`, after which no rank reaches another one."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())
