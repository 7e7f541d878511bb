"""Steps that update nothing: why, how often, and when that ends the run.

A step is skipped if its loss or a gradient is not finite, or if its loss is a number that is too
large to believe, a spike. All ranks have heard the same verdict and judge alike, so that an error
here is raised on all of them.

A step spikes if its mean loss L exceeds the median M of the last `window` good steps by more
than ln(ratio), that is if exp(L) > ratio · exp(M). A difference in nats means the same at a
loss of 10 and at one of 0.1; a ratio of losses would miss spikes at first and see too many at
the end. The median is hardly moved by a single bad step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from axsparse.config.schema import SpikesConfig
from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.errors import TrainingError, everywhere
from axsparse.training.checkpoint.manifest import FirstBad, SpikeHistory
from axsparse.training.parts import Parts


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


LONGEST_REASON = 1000
"""Letters of a reason that a checkpoint keeps."""


class SkippedSteps:
    """Counts skipped steps and gives up once there are too many in a row."""

    def __init__(self, settings: SpikesConfig, parts: Parts) -> None:
        self.not_finite = 0
        """Steps that were skipped because loss or gradients were not finite."""
        self.spiked = 0
        """Steps that were skipped because the loss spiked."""
        self.reason: str | None = None
        """Why the last step updated nothing; None if it did update."""
        self.first_bad: FirstBad | None = None
        """The first of the steps in a row that were skipped at the smallest loss scale."""
        self.spikes = SpikeRule(settings)
        self._settings = settings
        self._parts = parts

    def spike_of(self, step: int, verdict: Verdict) -> Spike | None:
        """The spike of step number `step`; None if its loss is usual or not finite."""
        return self.spikes.judge(step, verdict.loss) if verdict.finite else None

    def record(self, step: int, verdict: Verdict, spike: Spike | None) -> None:
        """Take note of step number `step`, and let the loss scale follow it.

        TrainingError on all ranks once too many steps in a row could not update.
        """
        self.reason = None
        if spike is not None:
            self._record_spike(spike)
            return
        if not verdict.finite:
            self.not_finite += 1
            self.reason = self._culprit(verdict)
        self.rescale(step, verdict)

    def rescale(self, step: int, verdict: Verdict) -> None:
        """Let the loss scale follow the verdict of step number `step`.

        TrainingError on all ranks once the smallest scale has failed too often.
        """
        scale = self._parts.loss_scale
        scale.update(finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss))
        if scale.skipped_at_floor == 0:
            self.first_bad = None
        elif self.first_bad is None:
            self.first_bad = FirstBad(step=step, what=self._culprit(verdict))
        if not scale.exhausted:
            return
        first = self.first_bad
        assert first is not None, "patience is 1 or more"
        raise everywhere(
            TrainingError(
                f"step {first.step}: {first.what}, and no step could update for {scale.patience} "
                f"in a row, up to step {step} (loss_scale.patience); lower "
                "optimizer.learning_rate, or look at the data"
            )
        )

    def _record_spike(self, spike: Spike) -> None:
        """Count a step that is skipped for a spike; TrainingError after too many in a row."""
        patience = self._settings.patience
        if self.spikes.in_a_row >= patience:
            raise everywhere(
                TrainingError(
                    f"step {spike.step}: {spike}, and {patience} steps in a row were skipped for "
                    "that (spikes.patience); lower optimizer.learning_rate, or look at the data"
                )
            )
        self.reason = str(spike)
        self.spiked += 1

    def _culprit(self, verdict: Verdict) -> str:
        """The rank, stage and replica whose loss or gradient is not finite, and which tensor's.

        A loss that is not finite spoils all gradients, so gradients are named only where every
        loss is finite. Where the gradients of each replica are finite by themselves, their sum
        is too large for its type, and the stage is named instead of a rank.
        """
        parts = self._parts
        grid = parts.place.grid
        if verdict.bad_loss is not None:
            rank = grid.rank(grid.g_inter - 1, verdict.bad_loss)
            return f"{grid.place(rank)}: the loss is not finite"
        assert verdict.culprit is not None, "a loss or a gradient is not finite"
        stage = parts.stage_of(verdict.culprit)
        column = grid.column(stage)
        # A single replica sums nothing, so that its gradients are looked at only once.
        bad = [rank for rank in column if rank in verdict.bad_ranks or len(column) == 1]
        where = str(grid.place(bad[0])) if bad else f"stage {stage}, summed"
        text = f"{where}: the gradient of {verdict.culprit} is not finite"
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:LONGEST_REASON]

    def summary(self) -> list[str]:
        """What the end of a run says of its skipped steps; empty if there were none."""
        said = []
        if self.not_finite:
            said.append(f"{self.not_finite} skipped with numbers that were not finite")
        if self.spiked:
            said.append(f"{self.spiked} skipped for a spike of the loss")
        return said
