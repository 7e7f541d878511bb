"""A transport for one test inside an MPI job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mpi4py import MPI

from axsparse.runtime.mpi.mpi_transport import MpiTransport

Made = TypeVar("Made")


def by_first_rank(make: Callable[[], Made]) -> Made:
    """The object that the first rank makes, on all ranks; the others leave it their cores
    meanwhile."""
    comm = MPI.COMM_WORLD
    made = make() if comm.rank == 0 else None
    ready = comm.Ibarrier()
    while not ready.Test():
        time.sleep(0.01)
    found: Made = comm.bcast(made, root=0)
    return found


@contextmanager
def on_mpi(make: Callable[[MPI.Intracomm], MpiTransport] = MpiTransport) -> Iterator[MpiTransport]:
    """All ranks of the job; closed only if the test passes, since a failed rank sends no more."""
    transport = make(MPI.COMM_WORLD)
    yield transport
    transport.close()
