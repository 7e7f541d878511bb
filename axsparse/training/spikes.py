"""Detects spikes of the loss.

A step spikes if its mean loss L exceeds the median M of the last `window` good steps by more
than ln(ratio), that is if exp(L) > ratio · exp(M). A difference in nats means the same at a
loss of 10 and at one of 0.1; a ratio of losses would miss spikes at first and see too many at
the end. The median is hardly moved by a single bad step. All ranks have the same losses, so
that all judge alike.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from axsparse.config.schema import SpikesConfig
from axsparse.training.checkpoint.manifest import SpikeHistory


@dataclass(frozen=True)
class Spike:
    """A step whose loss is too large."""

    step: int
    """The number of the step, from 1."""
    loss: float
    usual: float
    """The median loss of the good steps before it."""

    def __str__(self) -> str:
        return f"spike: the loss is {self.loss:.4g}, the usual one {self.usual:.4g}"


class SpikeRule:
    """Judges each loss by the losses before it, alike on every rank."""

    def __init__(self, settings: SpikesConfig) -> None:
        self.in_a_row = 0
        """Number of spikes since the last good step."""
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)

    def judge(self, step: int, loss: float) -> Spike | None:
        """The spike that a finite loss is; None if the loss is good, which is then remembered."""
        if self._settings.rule == "none":
            return None
        if len(self._losses) == self._settings.window:
            usual = median(self._losses)
            if loss - usual > math.log(self._settings.ratio):
                self.in_a_row += 1
                return Spike(step, loss, usual)
        self._losses.append(loss)
        self.in_a_row = 0
        return None

    def forget(self) -> None:
        """Forget the losses so far, since they say nothing about a network with other masks."""
        self._losses.clear()

    def history(self) -> SpikeHistory:
        """The state of the rule, which `restore` reads."""
        return SpikeHistory(losses=tuple(self._losses), in_a_row=self.in_a_row)

    def restore(self, history: SpikeHistory) -> None:
        """Continue with the history of a checkpoint."""
        self._losses.extend(history.losses)
        self.in_a_row = history.in_a_row
