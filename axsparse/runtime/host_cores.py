"""The cores of this machine that a process may use, and whether its ranks share them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CoreShare:
    """What one process may use of its machine."""

    cores: frozenset[int]
    """The numbers of the cores that it may run on."""
    quota: float | None = None
    """How many cores the processes of its container may keep busy; None for any number."""


def own_share(cgroup: Path = CGROUP) -> CoreShare:
    """The share of this process."""
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
    else:  # macOS binds no process to cores
        cores = frozenset(range(os.cpu_count() or 1))
    return CoreShare(cores, min(_quotas(cgroup), default=None))


def share_cores(ranks: Sequence[CoreShare]) -> bool:
    """Whether these ranks of one machine are more than the cores that they may use together.

    A rank counts for one core, so that settings of threads do not matter.
    """
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    quotas = [rank.quota for rank in ranks if rank.quota is not None]
    return len(ranks) > min([len(cores), *quotas])


def _quotas(cgroup: Path) -> Iterator[float]:
    """The limits that the container sets, in versions 2 and 1 of cgroups."""
    for text in (
        _text(cgroup / "cpu.max"),
        _text(cgroup / "cpu/cpu.cfs_quota_us") + " " + _text(cgroup / "cpu/cpu.cfs_period_us"),
    ):
        quota, _, period = text.strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
