"""`axsparse.train` whose last rank believes that it has another version of torch."""

from __future__ import annotations

from mpi4py import MPI

from axsparse import startup, train

if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    true_versions = startup.versions
    startup.versions = lambda: {**true_versions(), "torch": "1.13.1"}
train.main()
