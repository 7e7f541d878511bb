"""Waiting without burning a core: poll, and sleep longer and longer between polls.

How long depends on whether the ranks of a machine are more than the cores that they may use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime import cgroups

OWN_CORE = (*[0.0] * 20, *[50e-6] * 20, 200e-6)
"""Seconds of successive pauses of a rank that has a core to itself; the last one is repeated."""
SHARED_CORE = (50e-6, 100e-6, 200e-6, 500e-6)
"""The same pauses where a machine has more ranks than cores."""


class SleepingBackoff:
    """A `Backoff` that sleeps, at once and longer if others need the core meanwhile.

    Linux adds 50 µs to a sleep, and a poll takes 15 µs of CPU. A rank that waits with a core to
    itself takes 6 % of it and learns of a message after 0.2 ms; one that shares its core takes 2.5
    % and learns of it after 0.35 ms (docs/decisions/041).
    """

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


@dataclass(frozen=True)
class CoreShare:
    """The cores and CPU quota that one process may use."""

    cores: frozenset[int]
    """The numbers of the cores that it may run on."""
    quota: float | None = None
    """How many cores the processes of its container may keep busy; None for any number."""


def own_share(cgroup: Path = cgroups.CGROUP, own: Path = cgroups.OWN) -> CoreShare:
    """The share of this process."""
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
    else:  # macOS binds no process to cores
        cores = frozenset(range(os.cpu_count() or 1))
    return CoreShare(cores, min(_quotas(cgroup, own), default=None))


def share_cores(ranks: Sequence[CoreShare]) -> bool:
    """Whether these ranks of one machine are more than the cores that they may use together.

    A rank counts for one core, so that settings of threads do not matter.
    """
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    quotas = [rank.quota for rank in ranks if rank.quota is not None]
    return len(ranks) > min([len(cores), *quotas])


def _quotas(cgroup: Path, own: Path) -> Iterator[float]:
    """The limits of the control groups, in versions 2 and 1."""
    for folder in cgroups.folders("cpu", cgroup, own):
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
