"""The two things that a stage does; "F3" names the forward of microbatch 3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from axsparse.runtime.communication import Direction

_LETTERS = {Direction.FORWARD: "F", Direction.BACKWARD: "B"}


@dataclass(frozen=True)
class Action:
    """The forward or the backward of one microbatch."""

    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.direction]}{self.microbatch}"


@cache
def action(direction: Direction, microbatch: int) -> Action:
    """An `Action` that is made once and reused: policies return the same few again and again."""
    return Action(direction, microbatch)
