"""The step and the loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from axsparse.comm import Link, Op, Transport
from axsparse.config.schema import Config
from axsparse.data.batches import Batch, Batches
from axsparse.data.prefetch import Prefetcher
from axsparse.data_parallel.agreement import Agreement, Verdict, sum_by_owner
from axsparse.data_parallel.buffers import StageBuffers
from axsparse.data_parallel.sharded import WeightGather
from axsparse.data_parallel.sync import GradientSync
from axsparse.errors import ConfigError, TrainingError
from axsparse.evaluation import Evaluation, evaluate
from axsparse.grid import Place
from axsparse.models.survey import Survey
from axsparse.observe.metrics import MaskRecord
from axsparse.observe.phases import Phases
from axsparse.observe.recorder import Recorder, StepFigures, peak_memory_bytes
from axsparse.pipeline.engine import Engine
from axsparse.masking.change import Change, Masking, Now
from axsparse.samo.construct import BuiltLayer
from axsparse.samo.gradient import GradientCollector
from axsparse.samo.learning_rate import learning_rate
from axsparse.samo.loss_scale import LossScale
from axsparse.samo.memory import StateBytes
from axsparse.samo.norm import clip_factor, norm_partials
from axsparse.samo.optimizer import Hyper, Optimizer
from axsparse.samo.prune import masks_digest
from axsparse.samo.shards import Replicas
from axsparse.samo.update import update


@dataclass(frozen=True)
class Parts:
    """What a trainer works with; `build` puts it together."""

    transport: Transport
    place: Place
    survey: Survey
    stage_of: Callable[[str], int]
    """The stage that holds a parameter."""
    layers: Sequence[BuiltLayer]
    engine: Engine
    link: Link
    collector: GradientCollector
    sync: GradientSync
    weights: WeightGather
    buffers: StageBuffers
    replicas: Replicas
    """This rank among the replicas of its stage, for agreements and the exchange of state."""
    optimizer: Optimizer
    loss_scale: LossScale
    masking: Masking | None
    """Draws and changes masks between steps; None leaves them."""
    training: Batches
    validation: Batches | None
    metrics: Sequence[str]
    """Names of the model's metrics, which the last stage counts."""
    phases: Phases
    recorder: Recorder


class Trainer:
    """Trains one model on all ranks; every rank has one and calls the same methods."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """`config` with every `auto` resolved."""
        self.config = config
        self.parts = parts
        self.steps_done = 0
        self.last_evaluation: Evaluation | None = None
        self._updates = 0
        self._schedule_start = 0
        self._masks_changed: int | None = None
        self._closed = False
        self._warned: set[str] = set()
        self._prefetcher: Prefetcher | None = None
        self._agreement = self._agree_on_masks()

    # -- the way of a step --------------------------------------------------------------

    def step(self) -> Verdict:
        """Run the microbatches, sum the gradients, agree, update and expand.

        Loss and norm are those before the update. If either is not finite anywhere, no
        rank updates.
        """
        verdict = self._gradients(self._next_batch())
        if verdict.finite:
            self._update(verdict)
        else:
            self.parts.buffers.undo()
        self._rescale(verdict)
        self.steps_done += 1
        return verdict

    def _gradients(self, batch: Batch) -> Verdict:
        parts = self.parts
        parts.collector.begin()
        parts.sync.begin()
        parts.buffers.begin()
        losses = parts.engine.train(
            batch, self._targets(batch), parts.loss_scale.scale, parts.collector.last_microbatch
        )
        self._warn_of_unused(parts.collector.finish())
        parts.sync.finish()
        return self._agree(sum(losses))

    def _agree(self, loss: float) -> Verdict:
        parts = self.parts
        with parts.phases("optimizer"):
            partials = norm_partials([layer.state for layer in parts.layers], self._counted)
        with parts.phases("collective"):
            return self._agreement.reach(loss, partials, parts.loss_scale.scale)

    def _update(self, verdict: Verdict) -> None:
        parts, settings = self.parts, self.config.optimizer
        self._updates += 1
        hyper = Hyper(
            step=self._updates,
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
            )
        parts.weights.finish()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the step under way.

        After a rewinding the schedule begins anew, and its descent ends where it would have.
        """
        schedule = self.config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rising = 1.0
        if self._masks_changed is not None and self.config.pruning.rewarm_steps:
            since = self.steps_done - self._masks_changed + 1
            rising = min(1.0, since / self.config.pruning.rewarm_steps)
        return rising * learning_rate(
            self.steps_done - self._schedule_start,
            peak=self.config.optimizer.learning_rate,
            warmup_steps=schedule.warmup_steps,
            decay_steps=max(schedule.decay_steps - self._schedule_start, schedule.warmup_steps, 1),
            decay=schedule.decay,
            final_ratio=schedule.final_ratio,
            step_every=schedule.step_every,
            step_factor=schedule.step_factor,
        )

    # -- the loop -----------------------------------------------------------------------

    def train(self, on_step: Callable[[int, Verdict], None] | None = None) -> None:
        """All steps that are left, with evaluations and records; closes the trainer.

        `on_step(steps done, verdict)` is called on every rank after each step.
        """
        settings = self.config.train
        if self._closed:
            raise ConfigError("trainer: it has trained and is closed; build another one")
        try:
            if settings.eval_first and self.steps_done == 0:
                self._recorded_evaluation()
            while self.steps_done < settings.steps:
                self._change_masks()
                self._recorded_step(on_step)
                if settings.eval_every and self.steps_done % settings.eval_every == 0:
                    self._recorded_evaluation()
            if not settings.eval_every or settings.steps % settings.eval_every:
                self._recorded_evaluation()
            self.parts.recorder.flush()
            self._refuse_bad_end()
        finally:
            self.close()

    def evaluate(self) -> Evaluation | None:
        """Loss and metrics over `eval_steps` global batches of validation data, on all ranks;
        before, between and after steps. Training state stays as it is. None without such data."""
        parts = self.parts
        if parts.validation is None or self.config.train.eval_steps == 0:
            return None
        with parts.buffers.of_first_replica():
            self.last_evaluation = evaluate(
                parts.engine,
                parts.validation,
                self.config.train.eval_steps,
                parts.metrics,
                transport=parts.transport,
                place=parts.place,
            )
        return self.last_evaluation

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        return StateBytes.sum(layer.state.live_bytes() for layer in self.parts.layers)

    def close(self) -> None:
        """End what reads ahead, take the hooks off the weights, which would keep a model alive,
        and close the record; safe to call twice."""
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        for batches in (self.parts.training, self.parts.validation):
            if batches is not None:
                batches.close()
        self.parts.collector.close()
        self.parts.recorder.close()

    # -- details ------------------------------------------------------------------------

    def _recorded_step(self, on_step: Callable[[int, Verdict], None] | None) -> None:
        parts = self.parts
        parts.phases.begin_step()
        rate, before = self.learning_rate, self._bytes_sent()
        scale = parts.loss_scale.scale
        verdict = self.step()
        gradient_bytes, p2p_bytes = (
            after - start for after, start in zip(self._bytes_sent(), before, strict=True)
        )
        figures = StepFigures(
            step=self.steps_done,
            loss=verdict.loss,
            learning_rate=rate,
            grad_norm=verdict.grad_norm,
            loss_scale=scale,
            skipped=not verdict.finite,
            culprit=verdict.culprit,
        )
        most = {
            "model_state_bytes": self.state_bytes().total,
            "gradient_bytes_sent": gradient_bytes,
            "p2p_bytes_sent": p2p_bytes,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        parts.recorder.step(figures, parts.phases.end_step(), most)
        if on_step is not None:
            on_step(self.steps_done, verdict)

    def _recorded_evaluation(self) -> None:
        found = self.evaluate()
        if found is not None:
            self.parts.recorder.evaluation(self.steps_done, found.loss, found.metrics)

    def _next_batch(self) -> Batch:
        with self.parts.phases("data"):
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self.parts.training.training, self.steps_done)
            return self._prefetcher.get(self.steps_done)

    def _targets(self, batch: Batch) -> float:
        """The step's global count of targets, where the loss is computed; 1 elsewhere."""
        parts = self.parts
        if not parts.place.is_last:
            return 1.0
        each = parts.training.targets_per_sample
        if each is not None:
            return float(each * self.config.batch.global_batch_size)
        with parts.phases("collective"):
            count = torch.tensor([batch.num_targets], dtype=torch.float64)
            parts.replicas.exchange(Op.ALL_REDUCE, count)
        return max(1.0, count.item())

    def _agree_on_masks(self) -> Agreement:
        """Check that replicas keep the same entries, and lay out the agreement's vector."""
        parts, transport = self.parts, self.parts.transport
        digests = torch.zeros(parts.replicas.size, dtype=torch.float64)
        digests[parts.replicas.rank] = masks_digest(parts.layers)
        parts.replicas.exchange(Op.ALL_REDUCE, digests)
        for replica, digest in enumerate(digests.tolist()):
            if digest != digests[0].item():
                raise TrainingError(
                    f"masks: replica {replica} keeps other entries than replica 0 on stage "
                    f"{parts.place.stage}; masks must depend on seed, names and weights only"
                )
        kept = {tensor.name: tensor.kept for layer in parts.layers for tensor in layer.state.owned}
        names = parts.survey.counted
        self._counted = [name for name in names if name in kept]
        return Agreement(transport.world, transport.backoff, parts.place, names, kept)

    def _change_masks(self) -> None:
        """Let the masks change, and everything that depends on them follow."""
        masking = self.parts.masking
        if masking is None:
            return
        before = self.state_bytes().total
        change = masking.before_step(Now(self.steps_done, self._updates, self._score_gradients))
        if change is None:
            return
        if change.rewound:
            self._updates, self._schedule_start = 0, self.steps_done
        if change.changed:
            self._agreement = self._agree_on_masks()
            self._masks_changed = self.steps_done
        self._record_masks(change, before)

    def _score_gradients(self) -> None:
        """The gradients of the coming step's batch, into the state; nothing is updated."""
        parts = self.parts
        batch = parts.training.training(self.steps_done)
        while True:
            verdict = self._gradients(batch)
            parts.buffers.undo()
            if verdict.finite:
                return
            self._rescale(verdict)

    def _record_masks(self, change: Change, before: int) -> None:
        transport = self.parts.transport
        sizes = [before, self.state_bytes().total]
        rows = sum_by_owner(transport.world, transport.backoff, sizes)
        most = [int(max(column)) for column in zip(*rows, strict=True)]
        self.parts.recorder.masks(
            MaskRecord(self.steps_done, change.text, dict(change.figures), most[1], most[0])
        )

    def _bytes_sent(self) -> tuple[int, int]:
        """Bytes handed over so far: to other replicas, and to other stages."""
        sync = self.parts.sync
        return sync.gradient_bytes_sent, self.parts.link.bytes_sent + sync.tie_bytes_sent

    def _warn_of_unused(self, names: Sequence[str]) -> None:
        if self.parts.place.replica:
            return
        for name in names:
            if name not in self._warned:
                self._warned.add(name)
                print(
                    f"axsparse: warning: {self.parts.place}: parameter {name} got no gradient in "
                    f"step {self.steps_done + 1}; it counts as zero (freeze it if that is meant)",
                    file=sys.stderr,
                    flush=True,
                )

    def _refuse_bad_end(self) -> None:
        """TrainingError on all ranks if what was trained is good for nothing."""
        last = self.last_evaluation
        if last is not None and not math.isfinite(last.loss):
            lost = TrainingError(
                f"step {self.steps_done}: the validation loss is {last.loss}; lower "
                "optimizer.learning_rate, or look at the data"
            )
            lost.on_all_ranks = True
            raise lost
        masking = self.parts.masking
        if masking is not None and masking.unfinished is not None:
            lost = TrainingError(f"step {self.steps_done}: {masking.unfinished}")
            lost.on_all_ranks = True
            raise lost

    def _rescale(self, verdict: Verdict) -> None:
        """Let the loss scale follow; TrainingError on all ranks once nothing is left to try."""
        parts = self.parts
        parts.loss_scale.update(finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss))
        if not parts.loss_scale.exhausted:
            return
        what = f"the loss is {verdict.loss}"
        if verdict.culprit is not None:
            stage = parts.stage_of(verdict.culprit)
            rank = parts.place.grid.rank(stage, 0)
            what = f"rank {rank} (stage {stage}): the gradient of {verdict.culprit} is not finite"
        lost = TrainingError(
            f"step {self.steps_done + 1}: {what}, and no step could update for "
            f"{parts.loss_scale.patience} in a row (loss_scale.patience); lower "
            "optimizer.learning_rate, or look at the data"
        )
        lost.on_all_ranks = True
        raise lost
