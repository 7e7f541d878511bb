"""`axsparse.train` whose last rank believes that it has another version of torch."""

from __future__ import annotations

from unittest import mock

from mpi4py import MPI

from axsparse import train
from axsparse.runtime.provenance import versions

seen = versions()
if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    seen["torch"] = "1.13.1"
with mock.patch("axsparse.training.run_checks.versions", return_value=seen):
    train.main()
