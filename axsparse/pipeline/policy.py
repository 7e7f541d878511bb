"""What a stage does next, decided by what has arrived. Pure: no tensors, no messages, no time.

The engine executes a policy, the simulator plays the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from axsparse.pipeline.actions import Action, action
from axsparse.runtime.communication import Direction

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
        self._inputs = _Inputs(stage, g_inter, microbatches)
        self._bound = g_inter - stage + slack
        self._prefer: Preference = "backward" if self._inputs.is_last else prefer
        self._last_run: Direction | None = None

    @property
    def in_flight(self) -> int:
        """Forwards begun whose backward has not begun."""
        return self._inputs.in_flight

    @property
    def finished(self) -> bool:
        return self._inputs.begun[BACKWARD] == self._inputs.microbatches

    def expects(self, direction: Direction) -> bool:
        return self._inputs.expects(direction)

    def arrived(self, direction: Direction, microbatch: int) -> None:
        self._inputs.arrived(direction, microbatch)

    def next(self) -> Action | None:
        direction = self._choose()
        if direction is None:
            return None
        self._last_run = direction
        return self._inputs.begin(direction)

    def _choose(self) -> Direction | None:
        inputs = self._inputs
        forward = inputs.has(FORWARD) and inputs.in_flight < self._bound
        backward = inputs.has(BACKWARD)
        if forward and backward:
            if self._prefer == "alternate":
                return FORWARD if self._last_run is BACKWARD else BACKWARD
            return FORWARD if self._prefer == "forward" else BACKWARD
        if backward:
            return BACKWARD
        return FORWARD if forward else None


class InOrder:
    """A static schedule: a list of actions, each run once its input has arrived."""

    def __init__(self, actions: Sequence[Action], *, stage: int, g_inter: int) -> None:
        """`actions` are the whole run of this stage.

        ValueError unless they hold each microbatch's forward once and later its backward
        once, each kind in microbatch order: another order of the backwards would add up
        the gradients in another order.
        """
        _check_order(actions)
        self._actions = tuple(actions)
        self._inputs = _Inputs(stage, g_inter, len(actions) // 2)
        self._done = 0

    @property
    def finished(self) -> bool:
        return self._done == len(self._actions)

    def expects(self, direction: Direction) -> bool:
        return self._inputs.expects(direction)

    def arrived(self, direction: Direction, microbatch: int) -> None:
        self._inputs.arrived(direction, microbatch)

    def next(self) -> Action | None:
        if self.finished or not self._inputs.has(self._actions[self._done].direction):
            return None
        self._done += 1
        return self._inputs.begin(self._actions[self._done - 1].direction)


class _Inputs:
    """What of a stage's inputs has arrived and how many actions have begun, kind by kind.

    Both run in microbatch order. The first stage has all its forwards' inputs from the
    start, the last one a backward's as soon as its forward has begun.
    """

    __slots__ = ("_is_first", "begun", "here", "is_last", "microbatches")

    def __init__(self, stage: int, g_inter: int, microbatches: int) -> None:
        self._is_first = stage == 0
        self.is_last = stage == g_inter - 1
        self.microbatches = microbatches
        self.here = [microbatches if self._is_first else 0, 0]
        self.begun = [0, 0]

    @property
    def in_flight(self) -> int:
        return self.begun[FORWARD] - self.begun[BACKWARD]

    def has(self, direction: Direction) -> bool:
        return self.begun[direction] < self.here[direction]

    def expects(self, direction: Direction) -> bool:
        if self.is_last and direction is BACKWARD:
            return False  # it makes them itself
        return self.here[direction] < self.microbatches

    def arrived(self, direction: Direction, microbatch: int) -> None:
        assert not (self._is_first if direction is FORWARD else self.is_last), "no such neighbour"
        assert microbatch == self.here[direction], (
            f"{Action(direction, microbatch)} arrived, {self.here[direction]} was next"
        )
        assert microbatch < self.microbatches, f"{Action(direction, microbatch)} was never asked"
        self.here[direction] += 1

    def begin(self, direction: Direction) -> Action:
        microbatch = self.begun[direction]
        self.begun[direction] += 1
        if self.is_last and direction is FORWARD:
            self.here[BACKWARD] += 1
        return action(direction, microbatch)


def _check_order(actions: Sequence[Action]) -> None:
    seen = [0, 0]
    for found in actions:
        wanted = action(found.direction, seen[found.direction])
        if found != wanted:
            raise ValueError(
                f"schedule: {found} where {wanted} is next; forwards and backwards each run once, "
                "in microbatch order"
            )
        seen[found.direction] += 1
        if seen[BACKWARD] > seen[FORWARD]:
            raise ValueError(f"schedule: {found} before its forward; put F{found.microbatch} first")
    if seen[FORWARD] != seen[BACKWARD]:
        raise ValueError(
            f"schedule: {seen[FORWARD]} forwards, {seen[BACKWARD]} backwards; "
            "every forward needs its backward"
        )


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
        return action(FORWARD, self._begun - 1)
