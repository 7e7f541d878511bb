"""How often to save, for `checkpoint.every: auto`: as rarely as failures allow.

Saving holds a run up; not saving loses the steps since the last checkpoint at each failure. With C
seconds that a save holds the run up and M seconds between failures in the mean, the least time is
lost if T seconds of training lie between two saves:

    T ≈ √(2 C M)                                               (Young 1974)
    T ≈ √(2 C M) · [1 + √(C / 2M) / 3 + (C / 2M) / 9] − C       (Daly 2006, for C < 2 M; else M)

We take the second one. Of the time of such a run the part 1 − T / (M (exp((T + C) / M) − 1)) is
lost (Daly's equation 20, without the time of restarts), which is about √(2 C / M).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from axsparse.runtime.console import format_seconds

FIRST_COST = 1.0
"""Seconds that a save is taken to cost before one has been measured."""
MEASURED = 5
"""How many of the last saves count."""
TOLD_AGAIN = 1.5
"""The factor by which an interval must change until users get another message about it."""


def best_interval(cost: float, between_failures: float) -> float:
    """The seconds of training between two saves that lose the least time; arguments in seconds."""
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    young = math.sqrt(2 * cost * between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def expected_loss(cost: float, interval: float, between_failures: float) -> float:
    """The part of all time that saves and failures take, but for the time of restarts."""
    return 1 - interval / (between_failures * math.expm1((interval + cost) / between_failures))


class SaveInterval:
    """Asks for a checkpoint when it is time; one rank has it, and the agreement informs all others.

    It looks at the clock, so that runs save at other steps each time. Saving changes no bit.
    """

    def __init__(self, mtbf_hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`mtbf_hours` is the mean time between failures of the job."""
        self._between_failures = mtbf_hours * 3600
        self._hours = mtbf_hours
        self._clock = clock
        self._since = clock()
        self._steps = 0
        self._step_seconds = 0.0
        self._costs: deque[float] = deque(maxlen=MEASURED)
        self._told: float | None = None

    @property
    def cost(self) -> float:
        """Seconds that a save holds the run up: the median of the last ones."""
        return median(self._costs) if self._costs else FIRST_COST

    @property
    def seconds(self) -> float:
        """The seconds of training between two saves."""
        return best_interval(self.cost, self._between_failures)

    def asks(self) -> bool:
        """Whether it is time to save; called once a step."""
        self._steps += 1
        return self._clock() - self._since >= self.seconds

    def begin(self) -> None:
        """Note that a save begins."""
        self._step_seconds = (self._clock() - self._since) / max(self._steps, 1)
        self._since, self._steps = self._clock(), 0

    def end(self, cost: float) -> str | None:
        """Note that a save held the run up for so many seconds; returns a line for users, at first
        and whenever the interval has become another one."""
        self._costs.append(cost)
        seconds = self.seconds
        if self._told is not None and 1 / TOLD_AGAIN < seconds / self._told < TOLD_AGAIN:
            return None
        self._told = seconds
        loss = expected_loss(self.cost, seconds, self._between_failures)
        steps = max(1, round(seconds / self._step_seconds)) if self._step_seconds else 1
        return (
            f"checkpoint.every auto: a save holds the run up for {self.cost:.2g} s; with a failure "
            f"every {self._hours:g} h (checkpoint.mtbf_hours) one every {format_seconds(seconds)}, "
            f"some {steps} steps, loses least: {100 * loss:.2g} % of the time, and each restart"
        )
