"""The lowest validation loss so far, for `checkpoint.keep_best`."""

from __future__ import annotations

import math

from axsparse.config.schema import Config
from axsparse.training.checkpoint.manifest import BestEntry, Progress

MOVING = ("set", "rigl")
"""Pruning methods that replace entries all the time, and keep as many as before."""


class BestEvaluation:
    """Remembers the evaluation of lowest loss whose checkpoint is kept, alike on all ranks.

    A checkpoint holds the masks that are drawn after the evaluation of its step. So an evaluation
    counts only if no mask changes then, and what was found before a network loses entries counts
    no more, since a dense network would stay the best for ever.
    """

    def __init__(self, config: Config, progress: Progress | None) -> None:
        """`progress` is that of the checkpoint that the run goes on from."""
        self._keeps = config.checkpoint.keep_best
        self._moves = config.pruning.method in MOVING
        self.entry: BestEntry | None = None
        """The best evaluation; None before the first, and if none is looked for."""
        self._before: BestEntry | None = None
        if progress is not None and self._keeps:
            self.entry = self._before = progress.best

    def look(self, step: int, loss: float) -> None:
        """Take note of the evaluation after `step` steps; among equal losses the first is best."""
        self._before = self.entry
        is_lower = self.entry is None or loss < self.entry.loss
        if self._keeps and step > 0 and math.isfinite(loss) and is_lower:
            self.entry = BestEntry(step=step, loss=loss)

    def forget(self, step: int) -> None:
        """Take note that masks have changed after `step` steps."""
        if not self._moves:
            self.entry = None
        elif self.is_at(step):
            self.entry = self._before

    def is_at(self, step: int) -> bool:
        """Whether the evaluation after `step` steps is the best one."""
        return self.entry is not None and self.entry.step == step
