"""A transport for one test inside an MPI job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from axsparse.transport import MpiTransport


@contextmanager
def on_mpi(
    make: Callable[[MPI.Intracomm], MpiTransport] = MpiTransport,
) -> Iterator[MpiTransport]:
    """All ranks of the job; closed only if the test passes, since a failed rank sends no more."""
    transport = make(MPI.COMM_WORLD)
    yield transport
    transport.close()
