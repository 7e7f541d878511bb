"""The training loop: steps, and between them evaluations, masks, checkpoints and records.

`Trainer` comes first; behind it are the callbacks of the user, the choice of the best evaluation,
and what a run says at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data_parallel.agreement import Notice, Verdict
from axsparse.models.sequential import plain_model, refuse_dotted_names
from axsparse.observe.metrics import MaskRecord
from axsparse.observe.out_of_memory import explained
from axsparse.observe.recorder import StepFigures
from axsparse.observe.trace_file import TraceRecorder
from axsparse.observe.watchdog.watchdog import Watchdog
from axsparse.pruning.mask_file import MASK_FILE
from axsparse.pruning.methods.masking import Masking, Moment
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    StoppedError,
    TrainingError,
    everywhere,
    noted,
)
from axsparse.runtime.exchange import sum_by_owner, sum_of
from axsparse.runtime.stop_signal import StopRequest
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.checkpoint.checkpoint_folder import path_of
from axsparse.training.checkpoint.manifest import BestEntry, Progress
from axsparse.training.checkpoint.saver import Saver
from axsparse.training.evaluation import Evaluation, evaluate
from axsparse.training.live_weights import LiveWeights
from axsparse.training.parts import Parts
from axsparse.training.step import Step


class Trainer:
    """Trains one model on all ranks; every rank has one and calls the same methods."""

    def __init__(
        self,
        parts: Parts,
        *,
        saver: Saver | None = None,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Without `saver` nothing is saved, without `stop` no signal ends training, and without
        `watchdog` a hang lasts for ever. `progress` says where the resumed run stood; it is None
        for a new one.
        """
        self.config = config = parts.run.config
        self.parts = parts
        self.last_evaluation: Evaluation | None = None
        self._step = Step(parts)
        self._evaluated_at: int | None = None
        self._masked_at: int | None = None
        self._saver = saver
        self._stop = stop
        self._watchdog = watchdog
        self._is_stopped = False
        self._closed = False
        self._is_ended = False
        """Whether a callback has asked to end the run."""
        self._callbacks: dict[str, Callable[[int, Any], object] | None] = {}
        self._live_weights = LiveWeights(parts)
        if progress is not None:
            self._step.restore(progress)
            self._evaluated_at = progress.step if progress.evaluated else None
            self._masked_at = progress.step if progress.masked else None
        self._tracing = make_tracing(parts, self.steps_done)
        self._best = BestEvaluation(config, progress)

    @property
    def steps_done(self) -> int:
        """Steps since the run began, including those before it was resumed."""
        return self._step.position.steps_done

    @property
    def _is_over(self) -> bool:
        """Whether no step follows."""
        return self._is_ended or self.steps_done >= self.config.train.steps

    @property
    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return self._step.position.learning_rate

    def step(self) -> Verdict:
        """One training step (`Step.train_step`), in which all ranks also learn whether any of
        them was told to stop or still writes a checkpoint."""
        stop, saver = self._stop, self._saver
        verdict = self._step.train_step(
            lambda: Notice(
                stop is not None and stop.is_set,
                saver is not None and saver.is_writing,
                saver is not None and saver.asks(),
            )
        )
        self._is_stopped = verdict.notice.stop
        if saver is not None:
            saver.advance(any_writing=verdict.notice.writing)
            saver.is_asked = verdict.notice.save
        return verdict

    # -- the loop -----------------------------------------------------------------------

    @torch.inference_mode(mode=False)
    @torch.enable_grad()  # whoever calls may have switched gradients off
    def train(
        self,
        on_step: OnStep | None = None,
        *,
        on_evaluation: OnEvaluation | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        """Run all steps that are left, with evaluations, checkpoints and records, and close.

        The callbacks are called on every rank, between two steps: `on_step(steps done, verdict)`
        after each; then `on_checkpoint(step, folder)` for each checkpoint that has become whole,
        which are written beside the steps; then `on_evaluation(steps done, evaluation)`. An
        exception in one of them ends the run. If one returns True, on any rank, the run ends there
        as it ends after its last step. A run without evaluations warns of an `on_evaluation`, which
        it never calls. StoppedError on all ranks once a signal ends it before the
        last step and all is saved.
        """
        if self._closed:
            raise ConfigError("trainer: it has trained and is closed; build another one")
        parts = self.parts
        self._callbacks = {
            "on_step": on_step,
            "on_evaluation": on_evaluation,
            "on_checkpoint": on_checkpoint,
        }
        if self._watchdog is not None:
            self._watchdog.start()
        try:
            _refuse_no_functions(self._callbacks)
            with explained(
                parts.place.rank,
                lambda: (
                    f"{parts.phases.action or parts.activity.task} of step {parts.activity.step}"
                ),
                parts.state_bytes,
                parts.recorder.predicted_memory_bytes,
                parts.run_dir,
            ):
                self._heed_signal()
                self._warn_of_no_evaluation(on_evaluation)
                while self._between_steps():
                    self._recorded_step()
            parts.recorder.flush()
            if self._saver is not None:
                parts.activity.at("checkpoint", self.steps_done)
                self._saver.finish()
                self._tell_of_checkpoints()
            refuse_bad_end(self.steps_done, self.last_evaluation, parts.masking)
            for line in last_lines(self._progress(), self._step.skips.summary(), self._saver):
                parts.recorder.say(line)
        except AxsparseError as failure:
            # Every rank raises this error, so the checkpoint under way can still be finished.
            if failure.on_all_ranks and self._saver is not None:
                self._saver.finish()
            raise
        finally:
            self.close()

    def _warn_of_no_evaluation(self, on_evaluation: OnEvaluation | None) -> None:
        if on_evaluation is None:
            return
        if self.config.train.eval_steps == 0:
            why = "train.eval_steps is 0; set it, or leave on_evaluation out"
        elif self.parts.data.validation is None:
            why = "there are no validation data; give Datasets(training, validation)"
        else:
            return
        self.parts.recorder.say(f"warning: on_evaluation is never called: {why}")

    def _between_steps(self) -> bool:
        """Do all that stands between two steps; True if another step follows."""
        # Evaluate even if a signal asked to stop, since what is saved may have new masks.
        if self._evaluation_is_due() and (
            self._is_over or not self._is_stopped or self.parts.masking is not None
        ):
            self._recorded_evaluation()
            self._heed_signal()
        is_over = self._is_over
        stops = self._is_stopped and not is_over
        if not is_over and self._masked_at != self.steps_done:
            self._change_masks()
        saver = self._saver
        is_due = saver is not None and (
            saver.due(self.steps_done, is_last=is_over)
            or (self._best.is_at(self.steps_done) and saver.last_step != self.steps_done)
        )
        if saver is not None and (stops or is_due):
            self.parts.recorder.flush()
            self.parts.activity.at("checkpoint", self.steps_done)
            saver.start(self._progress())
        if stops:
            self._end_stopped()
        return not is_over

    def _evaluation_is_due(self) -> bool:
        settings, step = self.config.train, self.steps_done
        if step == self._evaluated_at:
            return False
        if step == 0:
            return settings.eval_first
        every = settings.eval_every
        return self._is_over or (every > 0 and step % every == 0)

    def evaluate(self) -> Evaluation | None:
        """Loss and metrics over `train.eval_steps` global batches of validation data.

        All ranks call this together, before, between or after steps; the training state does not
        change. None if there is no validation data. ConfigError on a rank whose neighbouring stage
        trains meanwhile; replicas that wait for each other are named by the watchdog.
        """
        parts = self.parts
        validation = parts.data.validation
        if validation is None or self.config.train.eval_steps == 0:
            return None
        parts.activity.at("evaluation", self.steps_done)
        with parts.statistics.of_first_replica():
            self.last_evaluation = evaluate(
                parts.engine,
                validation,
                self.config.train.eval_steps,
                tuple(parts.run.model.metrics),
                transport=parts.transport,
                place=parts.place,
            )
        return self.last_evaluation

    def save(self) -> Path:
        """Write a checkpoint now, and return its folder once it is complete.

        All ranks call this together, before, between or after steps, and before `close`.
        `axsparse export` and `ax.export` take the weights out of it. Raises, on all ranks alike,
        ConfigError for a trainer without a run directory, OutputError.
        """
        if self._saver is None:
            raise ConfigError("save: a quiet trainer has no run directory; build it without quiet")
        self._saver.start(self._progress())
        self._saver.finish()
        return path_of(self._saver.folder, self.steps_done)

    def save_mask(self, path: str | Path) -> None:
        """Write which entries are kept now as a mask file, the same in every layout.

        `pruning.mask` and `axsparse mask` read it. All ranks call this together, between steps.

        Raises, on all ranks alike, ConfigError if nothing is pruned, OutputError.
        """
        live = self.parts.live
        if live is None:
            raise ConfigError("mask file: nothing of this model is pruned; set pruning.sparsity")
        live.save(path)

    def state_dict(self, *, trained: bool = False) -> dict[str, Tensor] | None:
        """All weights and buffers as `ax.load` gives them for a checkpoint, on rank 0; None on
        the others. All ranks call this together, before, between or after steps."""
        return self._live_weights.collect(trained=trained, caches=False)

    def model(self, *, trained: bool = False) -> nn.Sequential | None:
        """The model as a module of plain torch on the CPU, on rank 0; None on the others.

        If `from_sequential` made the model from a user's subclass of `nn.Sequential`, the result is
        of that subclass, with all attributes that the user has set.

        Its weights are copies of the fp32 masters, zero where pruned, or with `trained` of the
        weights in the training precision. It is in evaluation mode, and its state dict has the
        global names. All ranks call this together, before, between or after steps; rank 0 needs
        memory for the whole model. ConfigError for a layer that has a dot in its name.
        """
        model = self.parts.run.model
        refuse_dotted_names(model)
        tensors = self._live_weights.collect(trained=trained, caches=True)
        return None if tensors is None else plain_model(model, self.parts.survey.ties, tensors)

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        return self.parts.state_bytes()

    def close(self) -> None:
        """End all threads, remove the hooks from the weights and close the record.

        Hooks would keep the model alive. It is safe to call this twice.
        """
        self._closed = True
        if self._saver is not None:
            self._saver.close()
        if self._stop is not None:
            self._stop.release()
        self._step.close()
        self.parts.collector.close()
        self.parts.recorder.close()
        if self._watchdog is not None:
            self._watchdog.close()

    # -- details ------------------------------------------------------------------------

    def _recorded_step(self) -> None:
        parts = self.parts
        parts.activity.at("training", self.steps_done + 1)
        self._step.check_layers()  # before anything of the step is counted
        if self._tracing is not None:
            self._tracing.begin(self.steps_done + 1)
        parts.phases.begin_step()
        rate, before = self.learning_rate, self._bytes_sent()
        scale = parts.loss_scale.scale
        verdict = self.step()
        gradient_bytes, p2p_bytes = (
            after - start for after, start in zip(self._bytes_sent(), before, strict=True)
        )
        skips = self._step.skips
        figures = StepFigures(
            step=self.steps_done,
            loss=verdict.loss,
            learning_rate=rate,
            grad_norm=verdict.grad_norm,
            loss_scale=scale,
            weights_digest=verdict.digest,
            skip_reason=skips.reason,
            skipped_steps=skips.not_finite + skips.spiked,
        )
        maxima = {
            "model_state_bytes": self.state_bytes().total,
            "gradient_bytes_sent": gradient_bytes,
            "p2p_bytes_sent": p2p_bytes,
            "peak_memory_bytes": parts.placement.peak_memory_bytes(),
        }
        seconds = parts.phases.end_step()
        if self._tracing is not None:
            self._tracing.end(self.steps_done)
        parts.recorder.step(figures, seconds, maxima)
        self._call_back("on_step", "after step", self.steps_done, verdict)
        self._tell_of_checkpoints()
        parts.activity.steps += 1

    def _call_back(self, name: str, when: str, step: int, value: object) -> None:
        """Call a callback, if there is one; the line of an exception in it names the callback.

        All ranks call each callback at the same points with equal arguments, so that a callback may
        do what ranks do together. The run ends if one of them returns True.
        """
        callback = self._callbacks.get(name)
        if callback is not None:
            # A callback may switch gradients off: the end of the block switches them on again.
            with noted(f"{name} {when} {step}"), torch.enable_grad():
                ends = callback(step, value) is True
            if sum_of(self.parts.transport, [float(ends)]) != [0.0] and not self._is_over:
                self._is_ended = True
                total = self.config.train.steps
                self.parts.recorder.say(f"{name} ends the run after step {self.steps_done}/{total}")

    def _tell_of_checkpoints(self) -> None:
        """Call `on_checkpoint` for the checkpoints that have become whole."""
        if self._saver is not None:
            for step in self._saver.take_whole():
                folder = path_of(self._saver.folder, step)
                self._call_back("on_checkpoint", "of step", step, folder)

    def _recorded_evaluation(self) -> None:
        evaluation = self.evaluate()
        self._evaluated_at = self.steps_done
        if evaluation is not None:
            self._best.look(self.steps_done, evaluation.loss)
            part = evaluation.samples < evaluation.available
            said = f"{evaluation.samples} of {evaluation.available} samples" if part else ""
            self.parts.recorder.evaluation(
                self.steps_done, evaluation.loss, evaluation.metrics, said
            )
            self._call_back("on_evaluation", "after step", self.steps_done, evaluation)

    def _change_masks(self) -> None:
        """Let the pruning method change the masks, and adapt all that depends on them."""
        self._masked_at = self.steps_done
        masking = self.parts.masking
        if masking is None:
            return
        before = self.state_bytes().total
        self.parts.activity.at("masks", self.steps_done)
        position = self._step.position
        now = Moment(position.steps_done, position.updates, self._step.score_gradients)
        change = masking.before_step(now)
        if change is None:
            return
        self._step.follow_masks(change)
        if change.changed:
            self._best.forget()
        transport, sizes = self.parts.transport, [before, self.state_bytes().total]
        rows = sum_by_owner(transport.world, transport.backoff, sizes)
        old, new = (int(max(column)) for column in zip(*rows, strict=True))
        self.parts.recorder.masks(
            MaskRecord(self.steps_done, change.text, dict(change.figures), new, old)
        )
        if change.is_final and self.parts.run_dir is not None:
            self.save_mask(self.parts.run_dir / MASK_FILE)

    def _bytes_sent(self) -> tuple[int, int]:
        """Bytes that were sent so far to other replicas, and to other stages and shards."""
        sync, members = self.parts.sync, self.parts.members
        of_members = 0 if members is None else members.bytes_sent
        others = self.parts.link.bytes_sent + sync.tie_bytes_sent + of_members
        return sync.gradient_bytes_sent, others

    def _progress(self) -> Progress:
        progress = self._step.progress(
            evaluated=self._evaluated_at == self.steps_done,
            masked=self._masked_at == self.steps_done,
        )
        return progress.model_copy(update={"best": self._best.entry})

    def _heed_signal(self) -> None:
        """Learn on all ranks, outside of a step, whether any of them was told to stop.

        StoppedError if so, and if nothing has been done yet that had to be saved.
        """
        stop, saver, transport = self._stop, self._saver, self.parts.transport
        if stop is None or saver is None or self._is_over:
            return
        if sum_of(transport, [float(stop.is_set)]) == [0.0]:
            return
        if self.steps_done in (0, saver.resumed_step):
            self._end_stopped()
        self._is_stopped = True

    def _end_stopped(self) -> None:
        """Wait for the checkpoint under way, then raise StoppedError on all ranks."""
        saver = self._saver
        assert saver is not None, "signals are taken where there is a place to save"
        saver.finish()
        self._tell_of_checkpoints()
        if self.steps_done == 0:
            raise StoppedError(
                "stopped before the first step, with nothing to save; --resume auto begins anew"
            )
        raise StoppedError(
            f"stopped after step {self.steps_done}, saved in {saver.folder}; --resume auto goes on"
        )


OnStep = Callable[[int, Verdict], object]
"""`on_step(steps done, verdict)`, after each step; True ends the run."""
OnEvaluation = Callable[[int, Evaluation], object]
"""`on_evaluation(steps done, evaluation)`, after each evaluation; True ends the run."""
OnCheckpoint = Callable[[int, Path], object]
"""`on_checkpoint(step, folder)`, once the checkpoint of a step is whole; True ends the run."""


def _refuse_no_functions(callbacks: Mapping[str, object]) -> None:
    """ConfigError for the first callback that cannot be called."""
    for name, called in callbacks.items():
        if called is not None and not callable(called):
            kind = type(called).__name__
            raise ConfigError(f"train: {name} is {kind}; give a function, or leave it out")


class BestEvaluation:
    """Remembers the evaluation of lowest loss whose checkpoint is kept, alike on all ranks.

    A checkpoint holds the masks that are drawn after the evaluation of its step, and an evaluation
    from before the network lost entries counts no more, since a dense network would stay the best
    for ever.
    """

    def __init__(self, config: Config, progress: Progress | None) -> None:
        """`progress` is that of the checkpoint that the run goes on from."""
        self._keeps = config.checkpoint.keep_best
        self.entry: BestEntry | None = None
        """The best evaluation; None before the first, and if none is looked for."""
        if progress is not None and self._keeps:
            self.entry = progress.best

    def look(self, step: int, loss: float) -> None:
        """Take note of the evaluation after `step` steps; among equal losses the first is best."""
        is_lower = self.entry is None or loss < self.entry.loss
        if self._keeps and step > 0 and math.isfinite(loss) and is_lower:
            self.entry = BestEntry(step=step, loss=loss)

    def forget(self) -> None:
        """Take note that masks have changed."""
        self.entry = None

    def is_at(self, step: int) -> bool:
        """Whether the evaluation after `step` steps is the best one."""
        return self.entry is not None and self.entry.step == step


def refuse_bad_end(steps_done: int, last: Evaluation | None, masking: Masking | None) -> None:
    """TrainingError on all ranks if the result of the training cannot be used."""
    if last is not None and not math.isfinite(last.loss):
        raise everywhere(
            TrainingError(
                f"step {steps_done}: the validation loss is {last.loss}; lower "
                "optimizer.learning_rate, or look at the data"
            )
        )
    if masking is not None and masking.unfinished is not None:
        raise everywhere(TrainingError(f"step {steps_done}: {masking.unfinished}"))


def last_lines(progress: Progress, skipped: list[str], saver: Saver | None) -> Iterator[str]:
    """How many steps were skipped, if any were, and where the result is."""
    if skipped:
        yield f"of {progress.step} steps: {', '.join(skipped)}"
    if saver is None:
        return
    run = saver.folder.parent
    if progress.best is not None:
        yield (
            f"lowest validation loss {progress.best.loss:.4f} after step {progress.best.step}, "
            f"kept in {path_of(saver.folder, progress.best.step)}"
        )
    if saver.last_step == progress.step:
        yield (
            f"saved in {saver.folder}  ·  axsparse report {run} draws it  ·  axsparse export "
            f"{run} --to torch --out weights.safetensors takes the weights out"
        )


def make_tracing(parts: Parts, steps_done: int) -> TraceRecorder | None:
    """Traces some steps, but not this run's first, which allocates and compiles; None if no step
    is to be traced, or there is no run directory."""
    train, folder = parts.run.config.train, parts.run_dir
    if train.trace == 0 or folder is None:
        return None
    last = min(steps_done + 1 + train.trace, train.steps)
    first = min(steps_done + 2, last)
    steps = range(first, last + 1)
    return TraceRecorder(parts.transport, parts.place, parts.phases, folder, steps)
