"""Files of shared memory that MPI libraries, NCCL and torch leave in /dev/shm when a job is killed.

They take memory of the host until somebody removes them. A job that fails removes the segments that
its ranks map, and a job that starts removes unused segments of earlier jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

SEGMENTS = re.compile(
    r"mpich_shm_|psm2_shm|psm3_shm|vader_segment|sm_segment|osc_rdma|ucx_shm|nccl-|torch_\d|cray-shared"
)
SHARED = Path("/dev/shm")  # noqa: S108 - nothing is written there
PROCESSES = Path("/proc")
STARTING_SECONDS = 300.0
"""A younger file may belong to a job that starts just now, whose ranks have yet to open it."""
ALL_PROCESSES = f"pid:[{0xEFFFFFFC}]"
"""The first namespace of processes, whose number Linux fixes; its /proc has every process."""


def leftovers(shared: Path, processes: Path) -> list[str]:
    """Names of shared-memory files of this user that no process maps or has open. Files of other
    users do not count, since their processes cannot be looked into."""
    names = set[str]()
    with contextlib.suppress(OSError):
        for path in shared.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if SEGMENTS.match(path.name) and status.st_uid == os.getuid():
                    names.add(str(path))
    for process in processes.iterdir() if names else ():
        if not process.name.isdigit():
            continue
        in_use = ""
        with contextlib.suppress(OSError):
            in_use += (process / "maps").read_text(errors="replace")
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    in_use += f"{descriptor.readlink()}\n"
        names = {name for name in names if f"{name}\n" not in in_use}
    return sorted(names)


def remove_leftovers(shared: Path = SHARED, processes: Path = PROCESSES) -> None:
    """Remove the segments of earlier jobs of this user, for a job that starts on this host; none in
    a container that does not see all processes, since others of its host may have the same
    /dev/shm."""
    with contextlib.suppress(OSError):
        if str((processes / "self" / "ns" / "pid").readlink()) != ALL_PROCESSES:
            return
        for name in leftovers(shared, processes):
            with contextlib.suppress(OSError):
                # A file of the future was made before the clock was set back.
                if abs(time.time() - Path(name).lstat().st_mtime) > STARTING_SECONDS:
                    Path(name).unlink()


def remove_own(shared: Path = SHARED, processes: Path = PROCESSES) -> None:
    """Remove the names of the segments that this process maps, before it ends a job for good. Other
    ranks of the job keep their segments until they end."""
    with contextlib.suppress(OSError):
        for line in (processes / "self" / "maps").read_text(errors="replace").splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == shared and SEGMENTS.match(path.name):
                path.unlink(missing_ok=True)
