"""The message-driven policy of split backwards: weight gradients run when nothing has arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axsparse.pipeline.actions import Action, Kind
from axsparse.pipeline.policy import UNKNOWN, Forecast, Inputs, Preference, chosen
from axsparse.runtime.communication import Direction

PATIENCE = 0.5
"""How far away an announced message may be, in times of a WEIGHT action, to be waited for."""
GREEDY = 0.0
"""The patience of stages whose neighbours announce nothing."""


@dataclass(frozen=True)
class Bounds:
    """What a stage may hold of the microbatches of one step.

    A microbatch is in flight from its forward to its backward, when all its activations are kept,
    and deferred from its backward to its weight gradients, for which the inputs and the output
    gradients of matrices are kept.
    """

    in_flight: int
    """Microbatches in flight."""
    held: float
    """Memory, in units of what a microbatch in flight takes: there are never more than
    `in_flight + deferred_size * deferred`."""
    deferred_size: float = 1.0
    """What a deferred microbatch takes, in the same unit. It is below 1 where activations are kept
    that weight gradients do not need, such as scores of attention, and above 1 where activations
    are recomputed."""

    def __post_init__(self) -> None:
        least = max(1.0, self.deferred_size)
        if self.in_flight < 1 or self.held < least or self.deferred_size <= 0:
            raise ValueError(
                f"bounds: {self}; in_flight has to be at least 1, deferred_size above 0 and held "
                f"at least {least:g}, what one microbatch takes"
            )

    def allow_forward(self, in_flight: int, deferred: int) -> bool:
        """Whether a further forward fits, and after it a backward."""
        size = self.deferred_size
        return (
            in_flight < self.in_flight
            and in_flight + 1 + size * deferred <= self.held
            and in_flight + size <= self.held
        )

    def allow_backward(self, in_flight: int, deferred: int) -> bool:
        """Whether a further backward fits. With nothing deferred it always does."""
        return in_flight - 1 + self.deferred_size * (deferred + 1) <= self.held


class MessageDrivenSplit:
    """Run a forward or a backward that has arrived, weight gradients if nothing has.

    Between a forward and a backward `prefer` decides as under `MessageDriven`. If an announced
    message, on whose arrival an action could run at once, is less than `patience` times a WEIGHT
    action away, the stage waits for it: a WEIGHT begun now would delay the stages behind it.
    With patience 0 it waits for nothing.

    It waits for nothing either while more microbatches are deferred than `most_deferred_waiting`.
    Stage s leaves s of them for the step's end, when s earlier stages still run backwards; what
    it leaves beyond these keeps it busy when all others are done.
    """

    # Reason: a stage's place, its step and the rule's three settings.
    def __init__(
        self,
        *,
        stage: int,
        g_inter: int,
        microbatches: int,
        bounds: Bounds,
        prefer: Preference = "alternate",
        patience: float = PATIENCE,
    ) -> None:
        self._inputs = Inputs(stage, g_inter, microbatches)
        self._bounds = bounds
        self._prefer: Preference = "backward" if self._inputs.is_last else prefer
        self._patience = patience
        self._most_deferred_waiting = most_deferred_waiting(stage, g_inter, bounds)
        self._last_run: Kind | None = None

    @property
    def in_flight(self) -> int:
        """How many microbatches have begun their forward and not their backward."""
        return self._inputs.in_flight

    @property
    def deferred(self) -> int:
        """How many microbatches have begun their backward and not their weight gradients."""
        return self._inputs.begun[Kind.BACKWARD] - self._inputs.begun[Kind.WEIGHT]

    @property
    def finished(self) -> bool:
        return self._inputs.begun[Kind.WEIGHT] == self._inputs.microbatches

    def expects(self, direction: Direction) -> bool:
        return self._inputs.expects(direction)

    def arrived(self, direction: Direction, microbatch: int) -> None:
        self._inputs.arrived(direction, microbatch)

    def next(self, forecast: Forecast = UNKNOWN) -> Action | None:
        inputs, bounds = self._inputs, self._bounds
        in_flight, deferred = self.in_flight, self.deferred
        may_forward = bounds.allow_forward(in_flight, deferred)
        may_backward = bounds.allow_backward(in_flight, deferred)
        kind = chosen(
            self._prefer,
            self._last_run,
            forward=may_forward and inputs.has(Kind.FORWARD),
            backward=may_backward and inputs.has(Kind.BACKWARD),
        )
        if kind is not None:
            self._last_run = kind
            return inputs.begin(kind)
        if not deferred:
            return None
        soonest = min(
            forecast.forward if may_forward else math.inf,
            forecast.backward if may_backward else math.inf,
        )
        waits = soonest < self._patience and deferred <= self._most_deferred_waiting
        return None if waits else inputs.begin(Kind.WEIGHT)


def most_deferred_waiting(stage: int, g_inter: int, bounds: Bounds) -> int:
    """How many microbatches a stage may have deferred and still wait for announced messages.

    It is as many as ZB-H1 leaves, the number of the stage, and more where more is held than
    1F1B's g_inter microbatches and a further one.
    """
    further = bounds.held - max(1.0, bounds.deferred_size) - g_inter
    return stage + max(0, int(further))
