"""What a rank is about, for a thread that asks: written by training, which pays next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Backoff

Task = Literal["training", "evaluation", "masks", "checkpoint"]


class Pulse:
    """Where a rank stands, and a count that grows as long as it gets on."""

    def __init__(
        self, phases: Phases, backoff: Backoff, awaited: Callable[[], Sequence[str]]
    ) -> None:
        """`awaited` says which messages the rank waits for, if it waits for messages."""
        self.task: Task = "training"
        self.step = 0
        """The step under way; of a task between two steps, the steps done."""
        self.steps = 0
        """Steps that this process has finished."""
        self._phases = phases
        self._backoff = backoff
        self._awaited = awaited
        self._beats = 0

    def at(self, task: Task, step: int) -> None:
        """Training goes on with this."""
        self.task, self.step = task, step
        self.beat()

    def beat(self) -> None:
        """Something was done that is in no phase; any thread may say so."""
        self._beats += 1

    @property
    def beats(self) -> int:
        """Grows with every piece of work; waiting and looking for messages is none."""
        return self._beats + self._phases.worked

    @property
    def pauses(self) -> int:
        """Grows while the rank waits for others."""
        return self._backoff.pauses

    @property
    def phase(self) -> str:
        """The phase under way."""
        return self._phases.current

    @property
    def action(self) -> str:
        """The forward or backward under way, such as "F3"; empty if there is none."""
        return self._phases.action

    @property
    def awaited(self) -> tuple[str, ...]:
        """The messages without which the rank cannot go on."""
        return tuple(self._awaited())
