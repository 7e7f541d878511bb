"""One training step: microbatches in, weights out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.batches import Batch
from axsparse.data.prefetch import Prefetcher
from axsparse.data_parallel.agreement import NOTHING, Agreement, Notice, Verdict
from axsparse.pruning.methods.masking import Change
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import TrainingError
from axsparse.samo.backend import to_host
from axsparse.samo.live_pruning import masks_digest, weights_digest
from axsparse.samo.optim.gradient_norm import clip_factor, norm_partials
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.learning_rate import learning_rate
from axsparse.samo.optim.update import update
from axsparse.training.checkpoint.manifest import FirstBad, Progress
from axsparse.training.parts import Parts
from axsparse.training.spikes import RewindOrder, Spike, SpikeRule

MOST_NAMED = 4
"""Parameters without a gradient that a warning names; a mixture of experts has hundreds."""


class Stepper:
    """Runs steps, one after the other, and knows where in the schedule they stand."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """`config` with every `auto` resolved. All ranks call this together."""
        self.steps_done = 0
        self.updates = 0
        """Steps that updated the weights, since the last rewinding."""
        self.schedule_start = 0
        """Steps done at the last rewinding, where the learning rate began anew."""
        self.masks_changed: int | None = None
        """Steps done at the last change of masks."""
        self.jumped = 0
        """Batches jumped over."""
        self.not_finite = 0
        """Steps skipped since loss or gradients were not finite."""
        self.spiked = 0
        """Steps skipped for a spike of the loss."""
        self.skipped: str | None = None
        """Why the last step updated nothing; None if it did."""
        self.back: RewindOrder | None = None
        """Where a spike in the last step sends the run."""
        self.spikes = SpikeRule(config.spikes)
        self._first_bad: FirstBad | None = None
        self._config = config
        self._parts = parts
        self._warned: set[str] = set()
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        self._refuse_unequal_replicas()
        self._agreement = self._agree_on_masks()

    def step(self, notice: Notice = NOTHING) -> Verdict:
        """Run the microbatches, sum the gradients, agree, update and expand.

        Loss and norm are those before the update. If either is not finite anywhere, or the loss
        spikes, no rank updates. `notice` reaches all ranks with the agreement.
        """
        self.skipped = self.back = spike = None
        verdict = self._gradients(self._next_batch(), notice)
        if verdict.finite:
            spike = self.spikes.judge(self.steps_done + 1, verdict.loss)
        if verdict.finite and spike is None:
            self._update(verdict)
        else:
            self._parts.buffers.undo()
        if spike is not None:
            self._heed(spike)
        else:
            if not verdict.finite:
                self.not_finite += 1
                self.skipped = self._what_is_bad(verdict)
            self._rescale(verdict)
        self.steps_done += 1
        return replace(verdict, spike=spike is not None)

    def _gradients(self, batch: Batch, notice: Notice = NOTHING) -> Verdict:
        parts = self._parts
        parts.collector.begin()
        parts.sync.begin()
        parts.buffers.begin()
        losses = parts.engine.train(
            batch, self._targets(batch), parts.loss_scale.scale, parts.collector.last_microbatch
        )
        self._warn_of_unused(parts.collector.finish())
        parts.sync.finish()
        return self._agree(losses, notice)

    @property
    def batch(self) -> int:
        """Number, from 0, of the batch of the step under way."""
        return self.steps_done + self.jumped

    def _agree(self, losses: Sequence[Tensor], notice: Notice) -> Verdict:
        parts = self._parts
        with parts.phases("optimizer"):
            squares = norm_partials([layer.state for layer in parts.layers], self._counted)
            extremes = parts.sync.own_extremes
            # The step's one trip of the host to a GPU.
            found = to_host([*losses, *extremes, *squares.values()])
        loss = sum(map(float, found[: len(losses)]))
        sums = found[len(found) - len(squares) :]
        is_finite = all(map(math.isfinite, found[len(losses) : len(losses) + len(extremes)]))
        partials = dict(zip(squares, sums, strict=True))
        scale = parts.loss_scale.scale
        with parts.phases("collective"):
            return self._agreement.reach(loss, partials, scale, notice, is_finite=is_finite)

    def _update(self, verdict: Verdict) -> None:
        parts, settings = self._parts, self._config.optimizer
        self.updates += 1
        hyper = Hyper(
            step=self.updates,
            learning_rate=self.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        with parts.phases("optimizer"):
            factor = clip_factor(verdict.grad_norm, settings.clip_norm)
            update(
                [layer.state for layer in parts.layers],
                parts.optimizer,
                hyper,
                factor / parts.loss_scale.scale,
                replicas=parts.replicas,
                updated=parts.weights.updated,
                visits=iter if parts.offload is None else parts.offload.visits,
            )
        parts.weights.finish()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the step under way.

        After a rewinding the schedule begins anew, and its descent ends where it would have.
        """
        schedule = self._config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rising = 1.0
        if self.masks_changed is not None and self._config.pruning.rewarm_steps:
            since = self.steps_done - self.masks_changed + 1
            rising = min(1.0, since / self._config.pruning.rewarm_steps)
        return rising * learning_rate(
            self.steps_done - self.schedule_start,
            peak=self._config.optimizer.learning_rate,
            warmup_steps=schedule.warmup_steps,
            decay_steps=max(schedule.decay_steps - self.schedule_start, schedule.warmup_steps, 1),
            decay=schedule.decay,
            final_ratio=schedule.final_ratio,
            step_every=schedule.step_every,
            step_factor=schedule.step_factor,
        )

    def _next_batch(self) -> Batch:
        batch, self._read_ahead = self._read_ahead, None
        if batch is not None:
            return batch
        with self._parts.phases("data"):
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._parts.training.training, self.batch)
            return self._prefetcher.get(self.batch)

    def _targets(self, batch: Batch) -> float:
        """The step's global count of targets, where the loss is computed; 1 elsewhere."""
        parts = self._parts
        if not parts.place.is_last:
            return 1.0
        each = parts.training.targets_per_sample
        if each is not None:
            return float(each * self._config.batch.global_batch_size)
        with parts.phases("collective"):
            count = torch.tensor([batch.num_targets], dtype=torch.float64)
            parts.replicas.exchange(Op.ALL_REDUCE, count)
        return max(1.0, count.item())

    def _odd_replica(self, digest: int) -> int | None:
        """The first replica with another digest than replica 0; None if all are equal."""
        replicas = self._parts.replicas
        digests = torch.zeros(replicas.size, dtype=torch.float64)
        digests[replicas.rank] = digest
        replicas.exchange(Op.ALL_REDUCE, digests)
        found: list[float] = digests.tolist()
        return next((replica for replica, own in enumerate(found) if own != found[0]), None)

    def _refuse_unequal_replicas(self) -> None:
        """Check that replicas start at the same weights: what they add to them is the same."""
        odd = self._odd_replica(weights_digest(self._parts.layers))
        if odd is not None:
            raise TrainingError(
                f"weights: replica {odd} starts at others than replica 0 on stage "
                f"{self._parts.place.stage}; draw them from torch's generator, which has the same "
                "seed everywhere, or in `init` from the one that is given, on hosts of one kind"
            )

    def _agree_on_masks(self) -> Agreement:
        """Check that replicas keep the same entries, and lay out the agreement's vector."""
        parts, transport = self._parts, self._parts.transport
        odd = self._odd_replica(masks_digest(parts.layers))
        if odd is not None:
            raise TrainingError(
                f"masks: replica {odd} keeps other entries than replica 0 on stage "
                f"{parts.place.stage}; masks must depend on seed, names and weights only"
            )
        kept = {tensor.name: tensor.kept for layer in parts.layers for tensor in layer.state.owned}
        names = parts.survey.counted
        self._counted = [name for name in names if name in kept]
        return Agreement(transport.world, transport.backoff, parts.place, names, kept)

    def follow(self, change: Change) -> None:
        """Go on with other masks; all ranks call this together after every change of them."""
        if change.rewound:
            self.updates, self.schedule_start = 0, self.steps_done
        if change.changed:
            self._agreement = self._agree_on_masks()
            self.masks_changed = self.steps_done
            self.spikes.forget()

    def score_gradients(self) -> None:
        """The gradients of the coming step's batch, into the state; nothing is updated."""
        parts = self._parts
        batch = self._read_ahead = self._next_batch()
        while True:
            verdict = self._gradients(batch)
            parts.buffers.undo()
            if verdict.finite:
                return
            self._rescale(verdict)

    def _warn_of_unused(self, names: Sequence[str]) -> None:
        if self._parts.place.replica:
            return
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned.update(new)
            more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
            sys.stderr.write(  # in one piece, since other stages may warn at the same moment
                f"axsparse: warning: {self._parts.place}: its microbatches of step "
                f"{self.steps_done + 1} gave no gradient to {', '.join(new[:MOST_NAMED])}{more}; "
                "it counts as zero (freeze what no sample ever uses)\n"
            )
            sys.stderr.flush()

    def progress(self, *, evaluated: bool, masked: bool) -> Progress:
        """Where training stands, between two steps."""
        scale = self._parts.loss_scale
        return Progress(
            step=self.steps_done,
            updates=self.updates,
            schedule_start=self.schedule_start,
            masks_changed=self.masks_changed,
            evaluated=evaluated,
            masked=masked,
            loss_scale=scale.scale,
            good_steps=scale.good_steps,
            skipped_at_floor=scale.skipped_at_floor,
            jumped=self.jumped,
            not_finite=self.not_finite,
            spiked=self.spiked,
            first_bad=self._first_bad,
            spikes=self.spikes.history(),
        )

    def restore(self, progress: Progress) -> None:
        """Go on from there; before the first step."""
        self.steps_done = progress.step
        self.updates = progress.updates
        self.schedule_start = progress.schedule_start
        self.masks_changed = progress.masks_changed
        self.jumped = progress.jumped
        self.not_finite = progress.not_finite
        self.spiked = progress.spiked
        self._first_bad = progress.first_bad
        self.spikes.restore(progress)
        scale = self._parts.loss_scale
        scale.scale = progress.loss_scale
        scale.good_steps = progress.good_steps
        scale.skipped_at_floor = progress.skipped_at_floor

    def close(self) -> None:
        """End what reads ahead; safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _heed(self, spike: Spike) -> None:
        """Nobody updates; TrainingError on all ranks once that has happened too often."""
        self.back = self.spikes.back(spike, self.batch)
        given_up = self.spikes.given_up(self.back)
        if given_up is not None:
            raise _lost(
                f"step {spike.step}: {spike}, and {given_up} (spikes.patience); lower "
                "optimizer.learning_rate, or look at the data"
            )
        self.skipped = str(spike)
        if self.back is None:
            self.spiked += 1
            if self._config.spikes.rule == "back":
                self.skipped += "; there is no checkpoint to go back to yet"
        else:
            self.skipped += f"; goes back to step {self.back.base} and jumps over the data since"

    def _rescale(self, verdict: Verdict) -> None:
        """Let the loss scale follow; TrainingError on all ranks once nothing is left to try."""
        scale, step = self._parts.loss_scale, self.steps_done + 1
        scale.update(finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss))
        if scale.skipped_at_floor == 0:
            self._first_bad = None
        elif self._first_bad is None:
            self._first_bad = FirstBad(step=step, what=self._what_is_bad(verdict))
        if not scale.exhausted:
            return
        first = self._first_bad
        assert first is not None, "patience is 1 or more"
        raise _lost(
            f"step {first.step}: {first.what}, and no step could update for {scale.patience} in a "
            f"row, up to step {step} (loss_scale.patience); lower optimizer.learning_rate, or "
            "look at the data"
        )

    def _what_is_bad(self, verdict: Verdict) -> str:
        """Rank, stage and replica, and whose numbers are not finite there.

        A loss that is none spoils all gradients; only where every loss is a number do they tell
        anything. Where each replica's are finite, their sum is too large for its type.
        """
        parts = self._parts
        if verdict.bad_loss is not None:
            rank = parts.place.grid.rank(parts.place.grid.g_inter - 1, verdict.bad_loss)
            return f"{parts.place.grid.place(rank)}: the loss is not finite"
        assert verdict.culprit is not None, "a loss or a gradient is not finite"
        stage = parts.stage_of(verdict.culprit)
        column = parts.place.grid.column(stage)
        # A single replica has nothing to sum and looks at its gradients once.
        bad = [rank for rank in column if rank in verdict.bad_ranks or len(column) == 1]
        where = str(parts.place.grid.place(bad[0])) if bad else f"stage {stage}, summed"
        text = f"{where}: the gradient of {verdict.culprit} is not finite"
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:1000]


def _lost(text: str) -> TrainingError:
    """The same on all ranks, since all have heard the same."""
    lost = TrainingError(text)
    lost.on_all_ranks = True
    return lost
