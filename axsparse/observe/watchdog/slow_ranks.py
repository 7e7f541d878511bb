"""Finds ranks that compute for longer than their peers, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from axsparse.runtime.grid import Grid

LEAST_SECONDS = 0.05
"""A slow rank takes this much longer than others; less may be noise, in short steps."""


class SlowRanks:
    """Compares the ranks' compute times over some steps, and warns of a slow rank.

    The replicas of a stage do the same work, so each is compared with the median of the others.
    Without other replicas, stages are compared, each by its share of the work. After a warning, a
    rank is named again only if it has been as fast as others in between.
    """

    def __init__(
        self, grid: Grid, work: Sequence[float], hosts: Sequence[str], *, ratio: float, steps: int
    ) -> None:
        """`work` has the work of each stage in any unit, `hosts` the hosts of all ranks. A rank is
        slow if it takes `ratio` times as long as others, over `steps` steps together."""
        self._places = [grid.coords(rank) for rank in range(grid.size)]
        self._has_peers = grid.g_data > 1
        self._work = [work[coords.stage] for coords in self._places]
        self._hosts = hosts
        self._ratio = ratio
        self._steps = steps
        self._sums = [0.0] * grid.size
        self._added = 0
        self._is_first = True
        self._warned: set[int] = set()

    def add(self, step: int, compute: Sequence[float]) -> str | None:
        """Add the seconds that each rank computed in a step; returns a warning, if there is one."""
        if self._is_first:
            self._is_first = False  # the first step also allocates, compiles and fills caches
            return None
        self._sums = [total + own for total, own in zip(self._sums, compute, strict=True)]
        self._added += 1
        if self._added < self._steps:
            return None
        seconds = [total / self._added for total in self._sums]
        self._sums, self._added = [0.0] * len(seconds), 0
        return self._compare(step, seconds)

    def _compare(self, step: int, seconds: Sequence[float]) -> str | None:
        usual = [self._usual(rank, seconds) for rank in range(len(seconds))]
        middle = median(seconds)
        slow = {
            rank: own / usual[rank]
            for rank, own in enumerate(seconds)
            # A slow rank with little work does not hold up others.
            if own >= middle
            and 0 < usual[rank] * self._ratio <= own
            and own - usual[rank] >= LEAST_SECONDS
        }
        new = {rank: slow[rank] for rank in slow.keys() - self._warned}
        self._warned = set(slow)
        if not new:
            return None
        rank = max(new, key=lambda number: (new[number], -number))
        more = len(new) - 1
        others = f", and {more} more {'is' if more == 1 else 'are'} slow" if more else ""
        whose = "the other replicas of its stage" if self._has_peers else "its work takes elsewhere"
        first = step - self._steps + 1
        return (
            f"warning: {self._places[rank]} on host {self._hosts[rank]}: computes "
            f"{new[rank]:.1f} times as long as {whose} ({seconds[rank]:.3g} s a step against "
            f"{usual[rank]:.3g} s, steps {first} to {step}){others}; see what else runs there"
        )

    def _usual(self, rank: int, seconds: Sequence[float]) -> float:
        """Seconds that others take for the work of this rank; 0 if there are no others."""
        coords = self._places[rank]
        others = [
            seconds[other.rank] / self._work[other.rank]
            for other in self._places
            if other.rank != rank
            and self._work[other.rank] > 0
            and (other.stage == coords.stage or not self._has_peers)
        ]
        return median(others) * self._work[rank] if others else 0.0
