"""The two things that a stage does, as objects and as text: "F3" is the forward of microbatch 3."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from axsparse.runtime.communication import Direction

_LETTERS = {Direction.FORWARD: "F", Direction.BACKWARD: "B"}
_DIRECTIONS = {letter: direction for direction, letter in _LETTERS.items()}


@dataclass(frozen=True)
class Action:
    """The forward or the backward of one microbatch."""

    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.direction]}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read what `str` writes; ValueError for any other text."""
        match = re.fullmatch(r"([FB])(0|[1-9][0-9]*)", text)
        if match is None:
            raise ValueError(f"action {text!r} is not F or B and a microbatch number, such as F3")
        return Action(_DIRECTIONS[match[1]], int(match[2]))


@cache
def action(direction: Direction, microbatch: int) -> Action:
    """An `Action` that is made once and reused: policies return the same few again and again."""
    return Action(direction, microbatch)


def to_text(actions: Iterable[Action]) -> str:
    """Write actions in their order, such as "F0 F1 B0"."""
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    """Read what `to_text` writes, with any white space; ValueError for any other text."""
    return [Action.parse(word) for word in text.split()]
