"""What a stage does next, decided by what has arrived. Pure: no tensors, no messages, no time.

The engine executes a policy, the simulator plays the same object.
"""

from __future__ import annotations

from typing import Literal, Protocol

from axsparse.comm import Direction
from axsparse.pipeline.actions import Action

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
Preference = Literal["alternate", "backward", "forward"]


class Policy(Protocol):
    """A state machine: arrivals in, actions out."""

    @property
    def finished(self) -> bool:
        """Whether every action of this run has been handed out."""
        ...

    def expects(self, direction: Direction) -> bool:
        """Whether a further message of this direction belongs to this run."""
        ...

    def arrived(self, direction: Direction, microbatch: int) -> None:
        """The input of an action is here."""
        ...

    def next(self) -> Action | None:
        """The action to run now, which counts as begun; None: wait for an arrival."""
        ...


class MessageDriven:
    """AxoNN's policy: run what has arrived, within a bound on activations in flight.

    Stage s holds at most `g_inter − s + slack` forwards without their backward. If a
    forward and a backward can both run, `prefer` decides: `alternate` takes the kind
    that did not run last, because two backwards in a row starve the stages
    downstream. The first stage has all inputs from the start; the last one runs each
    backward directly after its forward. Links are first-in-first-out, so forwards
    and backwards each run in microbatch order.
    """

    def __init__(
        self,
        *,
        stage: int,
        g_inter: int,
        microbatches: int,
        slack: int,
        prefer: Preference = "alternate",
    ) -> None:
        self._is_first = stage == 0
        self._is_last = stage == g_inter - 1
        self._bound = g_inter - stage + slack
        self._prefer = prefer
        self._microbatches = microbatches
        self._arrived = [microbatches if self._is_first else 0, 0]
        self._begun = [0, 0]
        self._last_run: Direction | None = None

    @property
    def in_flight(self) -> int:
        """Forwards begun whose backward has not begun."""
        return self._begun[FORWARD] - self._begun[BACKWARD]

    @property
    def finished(self) -> bool:
        return self._begun[BACKWARD] == self._microbatches

    def expects(self, direction: Direction) -> bool:
        if self._is_last and direction is BACKWARD:
            return False  # it makes them itself
        return self._arrived[direction] < self._microbatches

    def arrived(self, direction: Direction, microbatch: int) -> None:
        assert not (self._is_first if direction is FORWARD else self._is_last), "no such neighbour"
        assert microbatch == self._arrived[direction], (
            f"{Action(direction, microbatch)} arrived, {self._arrived[direction]} was next"
        )
        assert microbatch < self._microbatches, f"{Action(direction, microbatch)} was never asked"
        self._arrived[direction] += 1

    def next(self) -> Action | None:
        direction = self._choose()
        if direction is None:
            return None
        microbatch = self._begun[direction]
        self._begun[direction] += 1
        self._last_run = direction
        if self._is_last and direction is FORWARD:
            self._arrived[BACKWARD] += 1
        return Action(direction, microbatch)

    def _choose(self) -> Direction | None:
        forward = self._begun[FORWARD] < self._arrived[FORWARD] and self.in_flight < self._bound
        backward = self._begun[BACKWARD] < self._arrived[BACKWARD]
        if forward and backward:
            if self._is_last or self._prefer == "backward":
                return BACKWARD
            if self._prefer == "forward":
                return FORWARD
            return FORWARD if self._last_run is BACKWARD else BACKWARD
        if backward:
            return BACKWARD
        return FORWARD if forward else None


class ForwardOnly:
    """Evaluation: every forward once, in order."""

    def __init__(self, *, stage: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._arrived = microbatches if stage == 0 else 0
        self._begun = 0

    @property
    def finished(self) -> bool:
        return self._begun == self._microbatches

    def expects(self, direction: Direction) -> bool:
        return direction is FORWARD and self._arrived < self._microbatches

    def arrived(self, direction: Direction, microbatch: int) -> None:
        assert direction is FORWARD, "a backward in an evaluation"
        assert microbatch == self._arrived, f"F{microbatch} arrived, F{self._arrived} was next"
        self._arrived += 1

    def next(self) -> Action | None:
        if self._begun == self._arrived:
            return None
        self._begun += 1
        return Action(FORWARD, self._begun - 1)
