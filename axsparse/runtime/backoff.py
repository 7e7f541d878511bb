"""Waiting without burning a core: poll eagerly for a moment, then sleep between polls."""

from __future__ import annotations

import time

EAGER_POLLS = 20
SHORT_SLEEPS = 20
SHORT_SECONDS = 50e-6
LONG_SECONDS = 200e-6


class SleepingBackoff:
    """A `Backoff` of 20 pauses without sleep, 20 of 50 µs, and then 200 µs each.

    Measured with four ranks on two cores and messages every 20 ms: about 5 % CPU per
    waiting rank and 120 µs of delay, where a blocking receive took 49 % and slowed its
    computing neighbours.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._in_a_row = 0

    def pause(self) -> None:
        self.pauses += 1
        self._in_a_row += 1
        if self._in_a_row > EAGER_POLLS + SHORT_SLEEPS:
            time.sleep(LONG_SECONDS)
        elif self._in_a_row > EAGER_POLLS:
            time.sleep(SHORT_SECONDS)

    def reset(self) -> None:
        self._in_a_row = 0
