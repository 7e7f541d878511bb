"""One training step: microbatches in, weights out. `Step.train_step` is the step on one screen.

Behind it are the counters of a run (`Position`), and the checks that replicas have the same weights
and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.batches import Batch
from axsparse.data.prefetch import Prefetcher
from axsparse.data_parallel.agreement import NOTHING, Agreement, Notice, Verdict
from axsparse.pruning.methods.masking import Change
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import TrainingError, everywhere
from axsparse.runtime.grid import Grid, Place
from axsparse.runtime.launcher import write_line
from axsparse.samo.backend import to_host
from axsparse.samo.masks import masks_digest, weights_digest
from axsparse.samo.optim.gradient_norm import clip_factor, norm_partials
from axsparse.samo.optim.optimizer import Hyper, LearningRate, learning_rate, own_learning_rate
from axsparse.samo.optim.update import update
from axsparse.samo.shards import Replicas
from axsparse.training.checkpoint.manifest import Progress
from axsparse.training.parts import Parts
from axsparse.training.skipped_steps import SkippedSteps

MOST_NAMED = 4
"""A warning names at most this many parameters or buffers."""


class Step:
    """Runs training steps, one after the other, on the parts of one rank."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """`config` has every `auto` resolved. All ranks call this together.

        TrainingError if replicas have other weights or masks than replica 0.
        """
        self.position = Position(config, parts.learning_rate)
        """Where in its schedule the run stands."""
        self.skips = SkippedSteps(config.spikes, parts)
        """The steps that updated nothing."""
        self._config = config
        self._parts = parts
        self._warned: set[str] = set()
        self._unsplit: set[str] = set()
        self._buffers_are_compared = parts.place.grid.g_data == 1
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        digest = weights_digest(parts.layers)
        refuse_unequal_weights(digest, parts.replicas, parts.place)
        self._agreement = self._make_agreement()

    def train_step(self, notice: Callable[[], Notice] = lambda: NOTHING) -> Verdict:
        """Train on the next batch; the loss and norm returned were measured before the update.

        If the loss or a gradient is not finite anywhere, or the loss spikes, no rank updates.
        All ranks receive what `notice` returns with the agreement; it is called when everything
        else is computed. TrainingError on all ranks once too many steps in a row could not update,
        or once replicas are found to have other weights.
        """
        step = self.position.steps_done + 1
        batch = self._next_batch()
        self._begin_step()
        losses = self._forward_backward(batch)
        self._all_reduce_gradients()
        verdict = self._agree(losses, notice, self._digest())
        refuse_drifted_weights(verdict, step, self._parts.place.grid)
        spike = self.skips.spike_of(step, verdict)
        if verdict.finite and spike is None:
            self._clip_and_update(verdict)
        else:
            self._parts.statistics.undo()
        self._warn_of_own_buffers()
        self.skips.record(step, verdict, spike)
        self.position.steps_done = step
        return replace(verdict, spike=spike is not None)

    # -- the parts of a step, in their order ----------------------------------------------

    def _next_batch(self) -> Batch:
        batch, self._read_ahead = self._read_ahead, None
        if batch is not None:
            return batch
        with self._parts.phases("data"):
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._parts.training.training, self.position.batch)
            return self._prefetcher.get(self.position.batch)

    def _begin_step(self) -> None:
        """Open a step, whose first gradient of each parameter overwrites that of the last step."""
        self._parts.collector.begin()
        self._parts.sync.begin()
        self._parts.statistics.begin()

    def _forward_backward(self, batch: Batch) -> list[Tensor]:
        """Run all microbatches; returns their losses on the last stage, nothing elsewhere.

        Hooks compress every gradient as it appears (`samo/gradient_hooks.py`).
        """
        parts = self._parts
        losses = parts.engine.train(
            batch,
            self._count_targets(batch),
            parts.loss_scale.scale,
            lambda is_last: parts.collector.microbatch(is_last=is_last),
        )
        self._warn_of_unused(parts.collector.finish())
        self._warn_of_unsplit(parts.engine.unsplit)
        return losses

    def _all_reduce_gradients(self) -> None:
        """Wait for the sums over tied weights and replicas, which began while layers computed."""
        self._parts.sync.finish()

    def _digest(self) -> int:
        """A hash of this rank's weights in steps that compare replicas; 0 in other steps."""
        every, step = self._config.train.compare_replicas_every, self.position.steps_done + 1
        if not every or step % every or self._parts.place.grid.g_data == 1:
            return 0
        with self._parts.phases("optimizer"):
            return weights_digest(self._parts.layers)

    def _agree(
        self,
        losses: Sequence[Tensor],
        notice: Callable[[], Notice] = lambda: NOTHING,
        digest: int = 0,
    ) -> Verdict:
        """Tell all ranks the loss, the norm, and whether both are finite."""
        parts = self._parts
        with parts.phases("optimizer"):
            squares = norm_partials([layer.state for layer in parts.layers], self._counted)
            extremes = parts.sync.own_extremes
            # Losses, extremes and squares reach the host in one copy.
            found = to_host([*losses, *extremes, *squares.values()])
        loss = sum(map(float, found[: len(losses)]))
        sums = found[len(found) - len(squares) :]
        is_finite = all(map(math.isfinite, found[len(losses) : len(losses) + len(extremes)]))
        partials = dict(zip(squares, sums, strict=True))
        scale = parts.loss_scale.scale
        with parts.phases("collective"):
            return self._agreement.reach(
                loss, partials, scale, notice(), is_finite=is_finite, digest=digest
            )

    def _clip_and_update(self, verdict: Verdict) -> None:
        """Clip by the global norm, step the optimizer on kept entries, write the dense weights."""
        parts, settings = self._parts, self._config.optimizer
        self.position.updates += 1
        hyper = Hyper(
            step=self.position.updates,
            learning_rate=self.position.learning_rate,
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
                own=parts.groups.hypers(hyper, self.position.rate_of),
                updated=parts.weights.updated,
                visits=iter if parts.offload is None else parts.offload.visits,
            )
        parts.weights.finish()

    # -- between steps --------------------------------------------------------------------

    def score_gradients(self) -> None:
        """Compute the gradients of the coming step's batch and leave them in the state.

        Nothing is updated. The loss scale is lowered until the gradients are finite.
        """
        batch = self._read_ahead = self._next_batch()
        while True:
            self._begin_step()
            losses = self._forward_backward(batch)
            self._all_reduce_gradients()
            verdict = self._agree(losses)
            self._parts.statistics.undo()
            if verdict.finite:
                return
            self.skips.rescale(self.position.steps_done + 1, verdict)

    def follow_masks(self, change: Change) -> None:
        """Adapt counters and the agreement; all ranks call this together after masks changed."""
        self.position.follow_masks(rewound=change.rewound, changed=change.changed)
        if change.changed:
            self._agreement = self._make_agreement()
            self.skips.spikes.forget()

    def progress(self, *, evaluated: bool, masked: bool) -> Progress:
        """Where training stands, for a checkpoint between two steps.

        `evaluated` says that the evaluation after the last step is done, `masked` that the masks
        have been changed for the coming step.
        """
        position, skips, scale = self.position, self.skips, self._parts.loss_scale
        return Progress(
            step=position.steps_done,
            updates=position.updates,
            schedule_start=position.schedule_start,
            masks_changed=position.masks_changed,
            evaluated=evaluated,
            masked=masked,
            loss_scale=scale.scale,
            good_steps=scale.good_steps,
            skipped_at_floor=scale.skipped_at_floor,
            jumped=position.jumped,
            not_finite=skips.not_finite,
            spiked=skips.spiked,
            first_bad=skips.first_bad,
            spikes=skips.spikes.history(),
        )

    def restore(self, progress: Progress) -> None:
        """Go on from where a checkpoint stood; called before the first step."""
        position, skips, scale = self.position, self.skips, self._parts.loss_scale
        position.steps_done = progress.step
        position.updates = progress.updates
        position.schedule_start = progress.schedule_start
        position.masks_changed = progress.masks_changed
        position.jumped = progress.jumped
        skips.not_finite = progress.not_finite
        skips.spiked = progress.spiked
        skips.first_bad = progress.first_bad
        skips.spikes.restore(progress.spikes)
        scale.scale = progress.loss_scale
        scale.good_steps = progress.good_steps
        scale.skipped_at_floor = progress.skipped_at_floor

    def close(self) -> None:
        """End the thread that reads ahead; safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    # -- details --------------------------------------------------------------------------

    def _count_targets(self, batch: Batch) -> float:
        """The step's global number of targets, by which the last stage divides its losses.

        Other stages divide nothing and get 1.
        """
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

    def _make_agreement(self) -> Agreement:
        """Check that replicas keep the same entries, and lay out the vector of the agreement."""
        parts, transport = self._parts, self._parts.transport
        refuse_unequal_masks(masks_digest(parts.layers), parts.replicas, parts.place)
        kept = {tensor.name: tensor.kept for layer in parts.layers for tensor in layer.state.owned}
        names = parts.survey.counted
        self._counted = [name for name in names if name in kept]
        return Agreement(transport.world, transport.backoff, parts.place, names, kept)

    def _warn_of_own_buffers(self) -> None:
        """Warn, after the first step, of buffers that each replica has in its own way.

        Checkpoints hold the first replica's, from which all replicas resume.
        """
        if self._buffers_are_compared:
            return
        self._buffers_are_compared = True
        parts = self._parts
        names = [
            f"{parts.layers[number].spec.name}.{name}"
            for number, name in parts.statistics.different()
        ]
        if names and parts.place.replica == 0:
            write_line(
                f"warning: {parts.place}: each replica has its own {_listed(names)}; checkpoints "
                "hold the first replica's, so that a run that resumes goes on otherwise if "
                "training depends on them"
            )

    def _warn_of_unused(self, names: Sequence[str]) -> None:
        """Warn once of each parameter that no microbatch of a step gave a gradient to."""
        if self._parts.place.replica:
            return
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned.update(new)
            write_line(
                f"warning: {self._parts.place}: its microbatches of step "
                f"{self.position.steps_done + 1} gave no gradient to {_listed(new)}; it counts as "
                "zero (freeze what no sample ever uses)"
            )

    def _warn_of_unsplit(self, weights: Sequence[str]) -> None:
        """Warn once of each weight whose gradients a split backward leaves to autograd."""
        new = [name for name in weights if name not in self._unsplit]
        if new:
            self._unsplit.update(new)
            if self._parts.place.replica == 0:
                write_line(
                    f"{self._parts.place}: pipeline.split_backward leaves unsplit, since they have "
                    f"gradients besides that of one call of their layer: {_listed(new)}"
                )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


class Position:
    """The counters of a run, between two steps; the same on all ranks."""

    def __init__(self, config: Config, learning_rate: LearningRate | None = None) -> None:
        """`config` has every `auto` resolved; `learning_rate` is a schedule of the user's own."""
        self.steps_done = 0
        """Steps since the run began, skipped ones included."""
        self.updates = 0
        """Steps that updated the weights since the last rewinding."""
        self.jumped = 0
        """Batches that an earlier version of axsparse left out after spikes of the loss."""
        self.schedule_start = 0
        """The value of `steps_done` at the last rewinding, where the learning rate began anew."""
        self.masks_changed: int | None = None
        """The value of `steps_done` at the last change of masks; None before the first."""
        self._config = config
        self._own_rate = learning_rate

    @property
    def batch(self) -> int:
        """The number, from 0, of the batch that the coming step reads."""
        return self.steps_done + self.jumped

    @property
    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return self.rate_of(self._config.optimizer.learning_rate)

    def rate_of(self, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak.

        After a rewinding the schedule begins anew, and its descent ends where it would have
        ended without the rewinding. After a change of masks the rate rises linearly to the
        schedule's over `pruning.rewarm_steps` steps. A function of the user's own stands for all of
        the schedule; parameters with another peak than most have their part of what it gives.
        """
        schedule = self._config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rewarming = 1.0
        if self.masks_changed is not None and self._config.pruning.rewarm_steps:
            since = self.steps_done - self.masks_changed + 1
            rewarming = min(1.0, since / self._config.pruning.rewarm_steps)
        step = self.steps_done - self.schedule_start
        if self._own_rate is not None:
            usual = self._config.optimizer.learning_rate
            return rewarming * own_learning_rate(self._own_rate, step) * (peak / usual)
        return rewarming * learning_rate(
            step,
            schedule,
            peak=peak,
            decay_steps=max(schedule.decay_steps - self.schedule_start, schedule.warmup_steps, 1),
        )

    def follow_masks(self, *, rewound: bool, changed: bool) -> None:
        """Take note that the masks before the coming step were rewound or changed."""
        if rewound:
            self.updates, self.schedule_start = 0, self.steps_done
        if changed:
            self.masks_changed = self.steps_done


def refuse_unequal_weights(digest: int, replicas: Replicas, place: Place) -> None:
    """TrainingError if a replica of this stage starts at other weights than replica 0.

    `digest` is this rank's, from `weights_digest`. All replicas call this together.
    """
    odd = _odd_replica(digest, replicas)
    if odd is not None:
        raise TrainingError(
            f"weights: replica {odd} starts at others than replica 0 on stage {place.stage}; draw "
            "them from torch's generator, which has the same seed everywhere, or in `init` from "
            "the one that is given, on hosts of one kind"
        )


def refuse_unequal_masks(digest: int, replicas: Replicas, place: Place) -> None:
    """TrainingError if a replica of this stage keeps other entries than replica 0.

    `digest` is this rank's, from `masks_digest`. All replicas call this together.
    """
    odd = _odd_replica(digest, replicas)
    if odd is not None:
        raise TrainingError(
            f"masks: replica {odd} keeps other entries than replica 0 on stage {place.stage}; "
            "masks must depend on seed, names and weights only"
        )


def refuse_drifted_weights(verdict: Verdict, step: int, grid: Grid) -> None:
    """TrainingError on all ranks if a replica has come to other weights than replica 0."""
    if verdict.drifted is not None:
        place = grid.place(verdict.drifted)
        raise everywhere(
            TrainingError(
                f"step {step}: weights: replica {place.replica} has come to others than replica 0 "
                f"on stage {place.stage}; look for code that writes to weights beside the "
                "optimizer (through .data in a forward, say), or for bad memory of a host; resume "
                "from a checkpoint before that"
            )
        )


def _odd_replica(digest: int, replicas: Replicas) -> int | None:
    """The first replica with another digest than replica 0; None if all are equal."""
    digests = torch.zeros(replicas.size, dtype=torch.float64)
    digests[replicas.rank] = digest
    replicas.exchange(Op.ALL_REDUCE, digests)
    found: list[float] = digests.tolist()
    return next((replica for replica, own in enumerate(found) if own != found[0]), None)
