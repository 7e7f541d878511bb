"""The step and the loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from axsparse.checkpoint.manifest import Progress
from axsparse.checkpoint.save import Saver
from axsparse.comm import Link, Op, Transport
from axsparse.config.schema import Config
from axsparse.data.batches import Batch, Batches
from axsparse.data.prefetch import Prefetcher
from axsparse.data_parallel.agreement import Agreement, Notice, Verdict, sum_by_owner
from axsparse.data_parallel.buffers import StageBuffers
from axsparse.data_parallel.sharded import WeightGather
from axsparse.data_parallel.sync import GradientSync
from axsparse.errors import AxsparseError, ConfigError, StoppedError, TrainingError
from axsparse.evaluation import Evaluation, evaluate
from axsparse.grid import Place
from axsparse.masking.change import Change, Masking, Now
from axsparse.masking.live import Live
from axsparse.masking.saving import save_live
from axsparse.models.survey import Survey
from axsparse.observe.memory import peak_memory_bytes
from axsparse.observe.metrics import MaskRecord
from axsparse.observe.phases import Phases
from axsparse.observe.recorder import Recorder, StepFigures
from axsparse.observe.tracing import Tracing
from axsparse.pipeline.engine import Engine
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
from axsparse.stopping import StopRequest

TICKET_FILE = "ticket.safetensors"
"""In the run directory: the masks that the run's method has found."""


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
    live: Live | None
    """What is pruned of this rank's layers; None where nothing ever is."""
    masking: Masking | None
    """Draws and changes masks between steps; None leaves them."""
    training: Batches
    validation: Batches | None
    metrics: Sequence[str]
    """Names of the model's metrics, which the last stage counts."""
    phases: Phases
    recorder: Recorder
    run_dir: Path | None
    """Where the run writes; None if it does not."""


class Trainer:
    """Trains one model on all ranks; every rank has one and calls the same methods."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        *,
        saver: Saver | None = None,
        stop: StopRequest | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`config` with every `auto` resolved.

        Without `saver` nothing is saved; without `stop` no signal ends training. `progress`:
        where the run stood whose state the parts have.
        """
        self.config = config
        self.parts = parts
        self.steps_done = 0
        self.last_evaluation: Evaluation | None = None
        self._updates = 0
        self._schedule_start = 0
        self._masks_changed: int | None = None
        self._evaluated_at: int | None = None
        self._masked_at: int | None = None
        self._saver = saver
        self._stop = stop
        self._is_stopped = False
        if progress is not None:
            self._restore(progress)
        self._closed = False
        self._warned: set[str] = set()
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        self._agreement = self._agree_on_masks()
        self._tracing = self._make_tracing()

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
        self._is_stopped = verdict.notice.stop
        if self._saver is not None:
            self._saver.advance(any_writing=verdict.notice.writing)
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
            return self._agreement.reach(
                loss,
                partials,
                parts.loss_scale.scale,
                Notice(
                    stop=self._stop is not None and self._stop.is_set,
                    writing=self._saver is not None and self._saver.is_writing,
                ),
            )

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
        """All steps that are left, with evaluations, checkpoints and records; closes the trainer.

        `on_step(steps done, verdict)` is called on every rank after each step. StoppedError on
        all ranks once a signal ends it before the last step and all is saved.
        """
        if self._closed:
            raise ConfigError("trainer: it has trained and is closed; build another one")
        try:
            while self._is_next():
                self._recorded_step(on_step)
            self.parts.recorder.flush()
            if self._saver is not None:
                self._saver.finish()
            self._refuse_bad_end()
        except AxsparseError as failure:
            # All ranks are here, so that what they were saving can still become whole.
            if failure.on_all_ranks and self._saver is not None:
                self._saver.finish()
            raise
        finally:
            self.close()

    def _is_next(self) -> bool:
        """All that stands between two steps; whether a step follows."""
        is_over = self.steps_done >= self.config.train.steps
        stops = self._is_stopped and not is_over
        if not stops and self._evaluation_is_due():
            self._recorded_evaluation()
        if not is_over and self._masked_at != self.steps_done:
            self._change_masks()
        if self._saver is not None and (stops or self._saver.due(self.steps_done, is_last=is_over)):
            self.parts.recorder.flush()
            self._saver.start(self._progress())
        if stops:
            self._leave()
        return not is_over

    def _evaluation_is_due(self) -> bool:
        settings, step = self.config.train, self.steps_done
        if step == self._evaluated_at:
            return False
        if step == 0:
            return settings.eval_first
        every = settings.eval_every
        return step >= settings.steps or (every > 0 and step % every == 0)

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

    def save_ticket(self, path: str | Path) -> None:
        """Write which entries are kept now as a ticket file (`pruning.ticket`, `axsparse ticket
        show`), the same file in every layout. All ranks call this together, between steps.

        Raises, on all ranks alike, ConfigError if nothing is pruned, OutputError.
        """
        live = self.parts.live
        if live is None:
            raise ConfigError("ticket: nothing of this model is pruned; set pruning.sparsity")
        method = self.config.pruning.method
        save_live(live, self.parts.survey, Path(path), method, self.steps_done)

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        return StateBytes.sum(layer.state.live_bytes() for layer in self.parts.layers)

    def close(self) -> None:
        """End what reads ahead, take the hooks off the weights, which would keep a model alive,
        and close the record; safe to call twice."""
        self._closed = True
        if self._saver is not None:
            self._saver.close()
        if self._stop is not None:
            self._stop.release()
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
        if self._tracing is not None:
            self._tracing.begin(self.steps_done + 1)
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
        seconds = parts.phases.end_step()
        if self._tracing is not None:
            self._tracing.end(self.steps_done)
        parts.recorder.step(figures, seconds, most)
        if on_step is not None:
            on_step(self.steps_done, verdict)

    def _recorded_evaluation(self) -> None:
        found = self.evaluate()
        self._evaluated_at = self.steps_done
        if found is not None:
            self.parts.recorder.evaluation(self.steps_done, found.loss, found.metrics)

    def _next_batch(self) -> Batch:
        batch, self._read_ahead = self._read_ahead, None
        if batch is not None:
            return batch
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
        self._masked_at = self.steps_done
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
        if change.is_ticket and self.parts.run_dir is not None:
            self.save_ticket(self.parts.run_dir / TICKET_FILE)

    def _score_gradients(self) -> None:
        """The gradients of the coming step's batch, into the state; nothing is updated."""
        parts = self.parts
        batch = self._read_ahead = self._next_batch()
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

    def _make_tracing(self) -> Tracing | None:
        """The steps after this run's first one, which allocates and compiles."""
        wanted, folder = self.config.train.trace, self.parts.run_dir
        if wanted == 0 or folder is None:
            return None
        last = min(self.steps_done + 1 + wanted, self.config.train.steps)
        first = min(self.steps_done + 2, last)
        parts = self.parts
        return Tracing(parts.transport, parts.place, parts.phases, folder, first=first, last=last)

    def _progress(self) -> Progress:
        scale = self.parts.loss_scale
        return Progress(
            step=self.steps_done,
            updates=self._updates,
            schedule_start=self._schedule_start,
            masks_changed=self._masks_changed,
            evaluated=self._evaluated_at == self.steps_done,
            masked=self._masked_at == self.steps_done,
            loss_scale=scale.scale,
            good_steps=scale.good_steps,
            skipped_at_floor=scale.skipped_at_floor,
        )

    def _restore(self, progress: Progress) -> None:
        self.steps_done = progress.step
        self._updates = progress.updates
        self._schedule_start = progress.schedule_start
        self._masks_changed = progress.masks_changed
        self._evaluated_at = progress.step if progress.evaluated else None
        self._masked_at = progress.step if progress.masked else None
        scale = self.parts.loss_scale
        scale.scale = progress.loss_scale
        scale.good_steps = progress.good_steps
        scale.skipped_at_floor = progress.skipped_at_floor

    def _leave(self) -> None:
        """StoppedError on all ranks, once what was saved is there."""
        saver = self._saver
        assert saver is not None, "signals are taken where there is a place to save"
        saver.finish()
        raise StoppedError(
            f"stopped after step {self.steps_done}, saved in {saver.folder}; --resume auto goes on"
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
