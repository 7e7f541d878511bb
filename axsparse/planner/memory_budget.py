"""The memory that a rank may plan with, for `axsparse plan` and for training alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

HOST_SHARE = 0.8
"""The part of a host's memory that a run plans with. The rest is a margin: other processes, the
page cache, and freed blocks that the C library keeps."""
HOST_OVERHEAD = 0.4e9
"""Bytes that Python, torch and MPI take of a rank on a CPU (0.36 GB where that was measured)."""
GPU_OVERHEAD = 3.0e9
"""Bytes of a GPU that a plan leaves to the CUDA context (1.05 GB on an H100), to NCCL's connections
(some 2 GB, assumed), to workspaces of cuBLAS, and to holes between torch's blocks."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one rank: all that its process may take, and the overhead in it."""

    nbytes: float
    """Bytes that the process may take, everything included."""
    overhead: float
    """Bytes that the process takes without model state and activations."""

    @property
    def for_model(self) -> float:
        """Bytes left to model state and activations."""
        return self.nbytes - self.overhead


UNLIMITED = MemoryBudget(math.inf, 0.0)
"""The memory budget of a rank where nothing is known to limit it."""


def memory_budget(
    found: float, overhead: float, *, on_host: bool, limit: float | None = None
) -> MemoryBudget:
    """The memory budget of a rank that has `found` bytes of its host or its GPU.

    `overhead` is the bytes that its process takes in addition to model state and activations, and
    `limit` the bytes that the user allows it (`layout.memory_per_rank`, everything included), which
    replace `found`. Of a host's memory without a limit the rest after the overhead counts by
    `HOST_SHARE`.
    """
    if limit is not None:
        return MemoryBudget(limit, overhead)
    if on_host:
        return MemoryBudget(overhead + HOST_SHARE * (found - overhead), overhead)
    return MemoryBudget(found, overhead)
