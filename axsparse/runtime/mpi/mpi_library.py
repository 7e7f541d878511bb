"""Whether the MPI library of this process can read GPU memory."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path


def cuda_aware() -> bool | None:
    """Whether the MPI library that is loaded says that it can; None if it does not say."""
    for path in _loaded(r"libmpi(cxx|_\w+)?\.so"):
        with contextlib.suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    return None


def _loaded(pattern: str) -> list[str]:
    """Paths of the shared libraries of this process whose file names match a pattern."""
    paths = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path and re.match(pattern, path.rpartition("/")[2]):
                paths.append(f"/{path}")
    return sorted(set(paths))
