"""The environment variables by which launchers such as mpirun and srun describe a process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from axsparse.runtime.errors import ConfigError

LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
"""An MPI launcher sets one of these environment variables in every process, to its rank."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")
"""The variables in which launchers say how many ranks they started: Open MPI's mpirun; MPICH's
mpirun and srun with a PMI; jsrun."""
SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
"""The number of processes that srun started. If one of `SIZE_VARIABLES` is set as well, these may
be the daemons of an mpirun, one a node; SLURM_NTASKS then counts daemons, too."""
JOB_SIZE = "AXSPARSE_RANKS"
"""The variable in which a job script of `axsparse submit` says how many ranks it starts."""


def write_line(text: str) -> None:
    """Write a line to stderr in one piece, since other ranks may write at the same moment; print
    would write the end of the line on its own. A stderr that is lost changes no exit code."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"axsparse: {text}\n")
            sys.stderr.flush()


def started_by_launcher() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def speaks() -> bool:
    """Whether this process prints on behalf of all ranks as long as MPI has not started."""
    ranks = [os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ]
    if not ranks and SRUN_SIZE in os.environ:
        ranks = [os.environ.get("SLURM_PROCID", "0")]
    return all(rank == "0" for rank in ranks)


def check_size(size: int) -> None:
    """ConfigError unless MPI has found as many ranks (`size`) as the launcher started.

    A launcher and an MPI library that do not know each other report no error: each process
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
