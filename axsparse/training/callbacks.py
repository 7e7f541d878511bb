"""Functions of the user's own that a training calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.errors import noted
from axsparse.training.evaluation import Evaluation

OnStep = Callable[[int, Verdict], None]
"""`on_step(steps done, verdict)`, after each step."""
OnEvaluation = Callable[[int, Evaluation], None]
"""`on_evaluation(steps done, evaluation)`, after each evaluation."""
OnCheckpoint = Callable[[int, Path], None]
"""`on_checkpoint(step, folder)`, once the checkpoint of a step is whole."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of one training, each None if there is none.

    All ranks call each of them at the same points with equal arguments, so that a callback may do
    what ranks do together. An exception in one ends the run; its line names the callback.
    """

    on_step: OnStep | None = None
    on_evaluation: OnEvaluation | None = None
    on_checkpoint: OnCheckpoint | None = None

    def step(self, steps_done: int, verdict: Verdict) -> None:
        """Call `on_step`, if there is one."""
        if self.on_step is not None:
            with noted(f"on_step after step {steps_done}"):
                self.on_step(steps_done, verdict)

    def evaluation(self, steps_done: int, found: Evaluation) -> None:
        """Call `on_evaluation`, if there is one."""
        if self.on_evaluation is not None:
            with noted(f"on_evaluation after step {steps_done}"):
                self.on_evaluation(steps_done, found)

    def checkpoint(self, step: int, folder: Path) -> None:
        """Call `on_checkpoint`, if there is one."""
        if self.on_checkpoint is not None:
            with noted(f"on_checkpoint of step {step}"):
                self.on_checkpoint(step, folder)
