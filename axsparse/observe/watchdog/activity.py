"""The activity of a rank: training notes what it is doing, and the watchdog's thread reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Backoff

Task = Literal["training", "evaluation", "masks", "checkpoint"]


class Activity:
    """What a rank is doing, and a count that grows as long as it makes progress."""

    def __init__(
        self, phases: Phases, backoff: Backoff, awaited: Callable[[], Sequence[str]]
    ) -> None:
        """`awaited` gives the messages that the rank waits for."""
        self.task: Task = "training"
        self.step = 0
        """The step under way or, in a task between two steps, the number of steps done."""
        self.steps = 0
        """Steps that this process has finished."""
        self._phases = phases
        self._backoff = backoff
        self._awaited = awaited
        self._beats = 0

    def at(self, task: Task, step: int) -> None:
        """Note that this task begins."""
        self.task, self.step = task, step
        self.beat()

    def beat(self) -> None:
        """Note progress outside the phases; any thread may call this."""
        self._beats += 1

    @property
    def beats(self) -> int:
        """Grows with every piece of work; waiting and looking for messages are not work."""
        return self._beats + self._phases.worked

    @property
    def pauses(self) -> int:
        """A count that grows while the rank waits for others."""
        return self._backoff.pauses

    @property
    def phase(self) -> str:
        """The phase under way."""
        return self._phases.current

    @property
    def action(self) -> str:
        """The forward or backward pass under way, such as "F3"; empty if there is none."""
        return self._phases.action

    @property
    def awaited(self) -> tuple[str, ...]:
        """The messages that the rank needs to go on."""
        return tuple(self._awaited())
