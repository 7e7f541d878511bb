"""The three things that a stage does; "F3" names the forward of microbatch 3."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from axsparse.runtime.communication import Direction


class Kind(IntEnum):
    """What an action computes.

    A backward is whole or split. A whole one (BACKWARD alone) makes the gradients of its stage's
    inputs and weights. A split one is two actions: BACKWARD makes the gradients of the inputs,
    which the previous stage waits for, and leaves beside each weight what its gradient is made
    from (the layer's input and output gradient); WEIGHT, at any later time, makes the gradients of
    the weights from that and sends nothing. Which of the two a BACKWARD is, is the same for all
    actions of a run: `Schedule.split_backward`. (Qi et al., 2024, section 2.)
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}


@dataclass(frozen=True)
class Action:
    """The forward, the backward or the weight gradients of one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.microbatch}"

    @property
    def direction(self) -> Direction | None:
        """Where the result travels, and whence the input has come; None for weight gradients."""
        return None if self.kind is Kind.WEIGHT else Direction(self.kind)


@cache
def action(kind: Kind, microbatch: int) -> Action:
    """An `Action` that is made once and reused: policies return the same few again and again.

    A `Direction` will do as kind; mypy does not check the arguments of what is cached.
    """
    return Action(Kind(kind), microbatch)
