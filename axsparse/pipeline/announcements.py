"""What neighbouring stages tell each other of results to come.

A stage that begins an action says when its result will probably be sent, on its own clock. From
that and from how long messages take, the neighbour knows how soon to expect it, and can wait
instead of beginning weight gradients that would hold everybody up. Nothing else depends on it:
a wrong forecast costs time and changes no bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from axsparse.pipeline.actions import Action, Kind
from axsparse.pipeline.policy import UNKNOWN, Forecast, Policy, times_away
from axsparse.runtime.communication import Announcement, Backoff, Direction, Link, Message
from axsparse.runtime.grid import Place

REMEMBERED = 15
"""How many actions of a kind are looked at to tell how long the next one takes."""
REGULAR = 0.25
"""How far the quartiles of these lengths may be apart, as a part of the median. Where they are
farther apart nothing is announced, since waiting on a guess costs more than it brings."""


@dataclass
class _Way:
    """What comes from one neighbour."""

    announced: deque[Announcement] = field(default_factory=deque)
    """Of messages that have not arrived, in the order of sending."""
    least: float = math.inf
    """The shortest time from the sending of a message to its arrival in this step, in
    nanoseconds; how far the two clocks are apart is part of it."""
    least_before: float = math.inf
    """The same in the step before."""

    @property
    def transit(self) -> float:
        """How long a message takes at least; infinity until one has arrived.

        A message that arrives while its receiver computes is noticed late, so the least counts.
        Every step has messages that somebody waits for. Clocks drift, so old steps do not count.
        """
        return min(self.least, self.least_before)


class Announcements:
    """What one stage announces, and what has been announced to it."""

    def __init__(self, place: Place, link: Link, backoff: Backoff, *, is_on: bool) -> None:
        """With `is_on` false the stage announces nothing, and forecasts are `UNKNOWN`."""
        self._link = link
        self._backoff = backoff
        self.is_on = is_on
        ends = {Direction.FORWARD: place.is_last, Direction.BACKWARD: place.is_first}
        self._towards = [direction for direction, is_end in ends.items() if not is_end]
        """Where there is a neighbour."""
        self._ways = [_Way() for _ in Direction]
        self._begun: int | None = None
        """When the action under way has begun."""
        self._lengths: list[deque[int]] = [deque(maxlen=REMEMBERED) for _ in Kind]
        self._usual = [0.0] * len(Kind)
        """How long an action of each kind takes, in nanoseconds; 0 if none has been seen."""
        self._is_regular = [False] * len(Kind)
        """Whether that says much about the next one."""

    # -- what this stage says ---------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step of training, in which each action is announced."""
        for way in self._ways:
            way.least_before, way.least = way.least, math.inf

    def begin(self, action: Action) -> None:
        """Announce the result of an action that begins now, if a neighbour gets it and the time
        can be told."""
        if not self.is_on:
            return
        self._begun = self._backoff.now()
        direction, kind = action.direction, action.kind
        if direction in self._towards and self._is_regular[kind]:
            due = self._begun + round(self._usual[kind])
            self._link.announce(Announcement(direction, action.microbatch, due))

    def end(self, kind: Kind) -> int:
        """Learn from the action under way that its result is there; the time, for `sent_at`."""
        if self._begun is None:
            return 0
        now = self._backoff.now()
        self._lengths[kind].append(now - self._begun)
        lengths = sorted(self._lengths[kind])
        quarter = len(lengths) // 4
        self._usual[kind] = usual = median(lengths)
        self._is_regular[kind] = lengths[-1 - quarter] - lengths[quarter] <= REGULAR * usual
        self._begun = None
        return now

    # -- what neighbours have said ----------------------------------------------------------

    def take_in(self, messages: Iterable[Message]) -> None:
        """Note the messages that have just arrived, and what the link has been told of others."""
        announced = self._link.announced()
        if not self.is_on:
            return
        for announcement in announced:
            self._ways[announcement.direction].announced.append(announcement)
        for message in messages:
            way = self._ways[message.direction]
            if message.sent_at:
                way.least = min(way.least, self._backoff.now() - message.sent_at)
            numbers = [each.microbatch for each in way.announced]
            if message.microbatch in numbers:
                for _ in range(numbers.index(message.microbatch) + 1):
                    way.announced.popleft()

    def forecast(self, policy: Policy) -> Forecast:
        """How soon the messages that a policy expects will be here."""
        weight = self._usual[Kind.WEIGHT]
        if not weight or not any(way.announced for way in self._ways):
            return UNKNOWN
        now = self._backoff.now()
        return Forecast(
            *(
                times_away(way.announced[0].due + way.transit, now, weight)
                if way.announced and policy.expects(direction)
                else math.inf
                for direction, way in zip(Direction, self._ways, strict=True)
            )
        )
