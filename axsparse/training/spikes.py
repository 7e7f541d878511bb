"""When the loss jumps though it is a number, and where the run goes on from then.

A step spikes if its mean loss L is above the median M of the last `window` good steps by more
than ln(ratio), that is if exp(L) > ratio · exp(M). A difference in nats means the same at a loss
of 10 and of 0.1, where a ratio of losses would sleep at first and cry wolf at the end; the median
is not moved by the odd bad step. All ranks have the same losses, so that all judge alike.

Rule `back` does what PaLM's authors did by hand (Chowdhery et al. 2022, section 5.1): they went
back some 100 steps and left out 200 to 500 batches, those of the spike and before it. Here the
way back is the one to the last checkpoint, and what is left out are the batches since.
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
    """Its number, from 1."""
    loss: float
    usual: float
    """Median of the good steps before."""

    def __str__(self) -> str:
        return f"spike: the loss is {self.loss:.4g}, the usual one {self.usual:.4g}"


@dataclass(frozen=True)
class RewindOrder:
    """How a run goes on after a spike that sends it back."""

    spike: Spike
    base: int
    """Step of the checkpoint that it goes back to."""
    first_batch: int
    """Number, from 0, of the batch that it reads first there."""
    times: int
    """How often it has gone back to there, this time included."""

    def applied(self, progress: Progress) -> Progress:
        """What the checkpoint says of where the run stands, with the data jumped over."""
        spikes = progress.spikes.model_copy(update={"base": progress.step, "backs": self.times})
        jumped = self.first_batch - progress.step
        return progress.model_copy(update={"jumped": jumped, "spikes": spikes})

    def record(self, progress: Progress) -> BackRecord:
        """What metrics.jsonl keeps of it; `progress` as applied."""
        spike = self.spike
        return BackRecord(progress.step, spike.step, spike.loss, spike.usual, progress.jumped)


def without_base(progress: Progress) -> Progress:
    """The same in another run directory, which has no checkpoint to go back to yet."""
    spikes = progress.spikes.model_copy(update={"base": 0, "backs": 0})
    return progress.model_copy(update={"spikes": spikes})


class SpikeRule:
    """Judges losses by those before them; the same on every rank."""

    def __init__(self, settings: SpikesConfig) -> None:
        self.in_a_row = 0
        """Spikes since the last good step."""
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._base = 0
        self._backs = 0

    def judge(self, step: int, loss: float) -> Spike | None:
        """Take in a finite loss; a spike is not remembered among the good ones."""
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
        """Where a spike at this batch sends the run; None where it is only skipped."""
        if self._settings.rule != "back" or self._base == 0:
            return None
        return RewindOrder(spike, self._base, batch + 1, self._backs + 1)

    def given_up(self, back: RewindOrder | None) -> str | None:
        """Why a spike ends the run, for the user; None if it goes on."""
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
        """Masks have changed: what was usual before does not count."""
        self._losses.clear()

    def saved(self, step: int) -> None:
        """From now on a spike goes back to this step."""
        self._base, self._backs = step, 0

    def history(self) -> SpikeHistory:
        """For `restore`."""
        return SpikeHistory(
            losses=tuple(self._losses),
            in_a_row=self.in_a_row,
            base=self._base if self._settings.rule == "back" else None,
            backs=self._backs,
        )

    def restore(self, progress: Progress) -> None:
        """Go on where another run stood."""
        history = progress.spikes
        self._losses.extend(history.losses)
        self.in_a_row = history.in_a_row
        self._base = progress.step if history.base is None else history.base
        self._backs = history.backs
