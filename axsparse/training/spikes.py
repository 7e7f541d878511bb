"""Detects spikes of the loss, and decides how a run goes on after one.

A step spikes if its mean loss L exceeds the median M of the last `window` good steps by more
than ln(ratio), that is if exp(L) > ratio · exp(M). A difference in nats means the same at a
loss of 10 and at one of 0.1; a ratio of losses would miss spikes at first and see too many at
the end. The median is hardly moved by a single bad step. All ranks have the same losses, so
that all judge alike.

The rule `back` does what the authors of PaLM did by hand (Chowdhery et al. 2022, section 5.1):
they restarted some 100 steps before the spike and left out 200 to 500 batches. Here the run
goes back to its last checkpoint, and leaves out the batches since then.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from axsparse.config.schema import SpikesConfig
from axsparse.observe.metrics import BackRecord
from axsparse.training.checkpoint.manifest import Progress, SpikeHistory


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


@dataclass(frozen=True)
class RewindOrder:
    """Where a run resumes that a spike sends back to a checkpoint."""

    spike: Spike
    base: int
    """The step of the checkpoint that the run goes back to."""
    first_batch: int
    """The number, from 0, of the batch that it trains on first after that."""
    times: int
    """How often it has gone back to that checkpoint, this time included."""

    def applied(self, progress: Progress) -> Progress:
        """The progress of the checkpoint, without the batches before `first_batch`."""
        spikes = progress.spikes.model_copy(update={"base": progress.step, "backs": self.times})
        jumped = self.first_batch - progress.step
        return progress.model_copy(update={"jumped": jumped, "spikes": spikes})

    def record(self, progress: Progress) -> BackRecord:
        """The record for metrics.jsonl; `progress` is what `applied` has returned."""
        spike = self.spike
        return BackRecord(progress.step, spike.step, spike.loss, spike.usual, progress.jumped)


def without_base(progress: Progress) -> Progress:
    """The progress of a run that resumes in another run directory.

    That directory has no checkpoint yet that a spike could send the run back to, nor one of the
    best evaluation.
    """
    spikes = progress.spikes.model_copy(update={"base": 0, "backs": 0})
    return progress.model_copy(update={"spikes": spikes, "best": None})


class SpikeRule:
    """Judges each loss by the losses before it, alike on every rank."""

    def __init__(self, settings: SpikesConfig) -> None:
        self.in_a_row = 0
        """Number of spikes since the last good step."""
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._base = 0
        self._backs = 0

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

    def back(self, spike: Spike, batch: int) -> RewindOrder | None:
        """The order to go back after a spike at this batch; None if its step is only skipped."""
        if self._settings.rule != "back" or self._base == 0:
            return None
        return RewindOrder(spike, self._base, batch + 1, self._backs + 1)

    def given_up(self, back: RewindOrder | None) -> str | None:
        """Why the run ends after a spike, for the user; None if it goes on."""
        patience = self._settings.patience
        if back is not None and back.times > patience:
            return (
                f"the run went back to step {back.base} {patience} times and spiked again before "
                "its next checkpoint"
            )
        if back is None and self.in_a_row >= patience:
            return f"{patience} steps in a row were skipped for that"
        return None

    def forget(self) -> None:
        """Forget the losses so far, since they say nothing about a network with other masks."""
        self._losses.clear()

    def saved(self, step: int) -> None:
        """Note that a spike sends the run back to the checkpoint of this step from now on."""
        self._base, self._backs = step, 0

    def history(self) -> SpikeHistory:
        """The state of the rule, which `restore` reads."""
        return SpikeHistory(
            losses=tuple(self._losses),
            in_a_row=self.in_a_row,
            base=self._base if self._settings.rule == "back" else None,
            backs=self._backs,
        )

    def restore(self, progress: Progress) -> None:
        """Continue with the history in the progress of a checkpoint."""
        history = progress.spikes
        self._losses.extend(history.losses)
        self.in_a_row = history.in_a_row
        self._base = progress.step if history.base is None else history.base
        self._backs = history.backs
