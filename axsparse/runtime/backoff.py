"""Waiting without burning a core: poll, and sleep longer and longer between polls.

How long depends on whether the ranks of a machine are more than the cores that they may use.
"""

from __future__ import annotations

import time

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
