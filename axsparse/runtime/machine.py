"""Cores and memory of a machine: the share that a process may use, what it takes of it, and how it
waits without burning a core.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""A line for each hierarchy: its number, its controllers (none in version 2), the group's path."""
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files with the limit of a control group, in versions 2 and 1."""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
VARIABLES = {M_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", M_TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}
"""Environment variables with which a user makes these settings; glibc reads them at the start."""
MAPPED_BYTES = 1 << 20
"""Blocks from this size on are given back at once."""
LARGEST_KEPT = 32 << 20
"""Smaller blocks are kept when they are freed: as many as glibc allows."""
LEAST_KEPT, MOST_KEPT = 128 << 10, 1 << 30
"""Bytes that may be free at the end of the heap before they are given back: as glibc does by
itself, and where memory is kept."""
HOLES_GIVEN_BACK = 256 << 20
"""The least growth of a process after which it gives back what is free between its blocks."""


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Bytes that this process has resident now, or its peak if the system does not say."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes()


def give_back_at_once() -> bool:
    """Have the C library give every large freed block back to the system at once, and return
    whether it does that now (docs/reference/memory.md)."""
    return _set_malloc(M_MMAP_THRESHOLD, MAPPED_BYTES) and _set_malloc(M_TRIM_THRESHOLD, LEAST_KEPT)


def keep_freed_blocks() -> bool:
    """Have the C library keep freed memory for the next action instead of giving it back, and
    return whether it does that now."""
    return _set_malloc(M_MMAP_THRESHOLD, LARGEST_KEPT) and _set_malloc(M_TRIM_THRESHOLD, MOST_KEPT)


class HeapTrimmer:
    """Bounds what is free between the blocks of this process by a sixteenth of its memory, or by
    `HOLES_GIVEN_BACK` if that is more, where the C library is glibc."""

    def __init__(self) -> None:
        self._limit = 0

    def trim(self) -> None:
        """Give free pages back to the system if the process has grown since the last time."""
        if resident_memory_bytes() <= self._limit:
            return
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
        resident = resident_memory_bytes()
        self._limit = resident + max(resident // 16, HOLES_GIVEN_BACK)


def _set_malloc(setting: int, value: int) -> bool:
    """Change a setting of glibc's allocator; False if it is another's, or the user's own."""
    if VARIABLES[setting] in os.environ:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(setting, value))
    except (OSError, AttributeError):
        return False


def host_memory_bytes(cgroup: Path = CGROUP, own: Path = OWN) -> int:
    """Bytes of memory of this machine, or the limit of its container, job or process."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
    whole = whole if limit == resource.RLIM_INFINITY else min(whole, limit)
    files = product(_groups("memory", cgroup, own), LIMITS)
    texts = [_text(folder / name) for folder, name in files]
    return min([whole, *(int(text) for text in texts if text.isdigit())])


@dataclass(frozen=True)
class CoreShare:
    """The cores and CPU quota that one process may use."""

    cores: frozenset[int]
    quota: float | None = None
    """How many cores the processes of its container may keep busy; None for any number."""


def own_share(cgroup: Path = CGROUP, own: Path = OWN) -> CoreShare:
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
    else:  # macOS binds no process to cores
        cores = frozenset(range(os.cpu_count() or 1))
    return CoreShare(cores, min(_quotas(cgroup, own), default=None))


def share_cores(ranks: Sequence[CoreShare]) -> bool:
    """Whether these ranks of one machine are more than the cores that they may use together. A rank
    counts for one core, so that settings of threads do not matter."""
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    quotas = [rank.quota for rank in ranks if rank.quota is not None]
    return len(ranks) > min([len(cores), *quotas])


def _quotas(cgroup: Path, own: Path) -> Iterator[float]:
    for folder in _groups("cpu", cgroup, own):
        for text in (
            _text(folder / "cpu.max"),
            _text(folder / "cpu.cfs_quota_us") + " " + _text(folder / "cpu.cfs_period_us"),
        ):
            quota, _, period = text.strip().partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _groups(controller: str, cgroup: Path, own: Path) -> Iterator[Path]:
    """The folders of the groups of a controller, such as "memory", from the process's own group up
    to the root, in versions 2 and 1. A container may see its own group as the root."""
    yield from (cgroup, cgroup / controller)
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, group = cgroup / controller if controllers else cgroup, Path(path.lstrip("/"))
        if ".." not in group.parts:  # a group outside the container
            yield from (root / each for each in (group, *group.parents))


OWN_CORE = (*[0.0] * 20, *[50e-6] * 20, 200e-6)
"""Seconds of successive pauses of a rank that has a core to itself; the last one is repeated."""
SHARED_CORE = (50e-6, 100e-6, 200e-6, 500e-6)
"""The same pauses where a machine has more ranks than cores."""


class SleepingBackoff:
    """A `Backoff` that sleeps, at once and longer if others need the core meanwhile
    (docs/decisions/041)."""

    def __init__(self, *, shares_core: bool = False) -> None:
        """`shares_core` says whether the ranks of this machine are more than their cores."""
        self.pauses = 0
        self._seconds = SHARED_CORE if shares_core else OWN_CORE
        self._in_a_row = 0

    def pause(self) -> None:
        self.pauses += 1
        seconds = self._seconds[min(self._in_a_row, len(self._seconds) - 1)]
        self._in_a_row += 1
        if seconds:
            time.sleep(seconds)

    def reset(self) -> None:
        self._in_a_row = 0
