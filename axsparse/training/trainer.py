"""The training loop: steps, and between them evaluations, masks, checkpoints and records.

`Trainer` comes first; behind it are the callbacks of the user, and what a run says at its end.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from axsparse.config.schema import Config, with_absolute_paths
from axsparse.config.validate import check_step, replaced
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.gradient_sync import GradientSync, WeightGather
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.data_parallel.step_consensus import NOTHING, Flags, StepResult
from axsparse.models.layer import LossFunction, MetricFunction, Model
from axsparse.models.sequential import (
    OwnValues,
    Snapshot,
    plain_model,
    reject_dotted_names,
    with_numbers,
)
from axsparse.models.teacher import with_teacher
from axsparse.observe.metrics import MaskRecord
from axsparse.observe.out_of_memory import with_advice
from axsparse.observe.phases import DevicePhases, Phases
from axsparse.observe.recorder import StepFigures
from axsparse.observe.trace_file import TraceRecorder
from axsparse.observe.watchdog.watchdog import Activity, open_watchdog
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.policy import Policy, action
from axsparse.planner.auto_layout import configured_schedule
from axsparse.pruning.criteria import Score
from axsparse.pruning.mask_file import MASK_FILE
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.method_registry import choose_pruner
from axsparse.pruning.methods.pruner import StepContext
from axsparse.runtime.errors import (
    EXIT_CONFIG,
    ConfigError,
    StoppedError,
    TrainingError,
    check_kind,
    everywhere,
    note_errors,
)
from axsparse.runtime.exchange import gather_numbers, meet, sum_of, together
from axsparse.runtime.files.paths import expanded
from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.job import NOTHING_SAVED, Job, own_job
from axsparse.runtime.machine import keep_freed_blocks
from axsparse.runtime.process import exit_in_c, flush_streams, write_line
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.offload import Offload
from axsparse.samo.optim.optimizer import LearningRate, Optimizer
from axsparse.samo.state_bytes import StateBytes
from axsparse.tensor_parallel.lockstep import ActionBroadcast, Lockstep
from axsparse.tensor_parallel.modules import Sharding
from axsparse.training.build import (
    build_state,
    check_settings,
    launch_warnings,
    load_state,
    open_run_directory,
    placed,
    prepare_process,
    profile_together,
    reject_arguments,
    reject_other_run,
    stage_link,
    stage_of_layers,
    stage_products,
    stage_ties,
)
from axsparse.training.checkpoint.checkpoint_folder import path_of
from axsparse.training.checkpoint.saver import Saver
from axsparse.training.evaluation import Evaluation, evaluate
from axsparse.training.export import save_folder
from axsparse.training.live_weights import LiveWeights
from axsparse.training.plan import found_budget, plan_run
from axsparse.training.progress import Progress
from axsparse.training.run_directory import RunDir, find_run
from axsparse.training.run_recorder import make_recorder
from axsparse.training.run_sources import (
    DataSource,
    ModelSource,
    RunSources,
    open_data,
    run_sources,
    with_example,
)
from axsparse.training.step import Step


class Trainer:
    """Trains one model on all ranks; every rank makes one and calls the same methods.

        trainer = ax.Trainer(model, data=(train, validation), config="my_run.yaml", g_inter=2)
        for step in trainer:
            result = trainer.step()

    `mpirun -n 4 python my_model.py` starts such a program on four ranks.
    """

    # Reason: these are the arguments of the Python API, all optional.
    def __init__(
        self,
        model: ModelSource = None,
        data: DataSource = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        loss: LossFunction | None = None,
        metrics: Mapping[str, MetricFunction] = {},
        score: Score | None = None,
        optimizer: Optimizer | None = None,
        learning_rate: float | LearningRate | None = None,
        quiet: bool = False,
        resume: str | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        """Connect this process to the other ranks, and build or read the state of its layers.

        Args:
            model: An `nn.Module` whose forward runs the members of its lists one after the other
                (`ax.from_module`), `ax.from_sequential(modules, loss)`, another `ax.Model`,
                `ax.hf(folder)`, the name of a model such as "gpt", or None for the settings' model.
            data: The training data, a pair (training, validation), `ax.tokens(path)`, or None for
                the settings' data. A function that returns `ax.Datasets` is called on the first
                and last stages only, which read, and for an `nn.Module` on all.
            config: The path or name of a configuration, a dictionary of settings by dotted keys or
                by sections, or an `ax.Config`.
            loss: The loss of an `nn.Module`: `loss(*outputs, targets)` returns the sum over a
                microbatch.
            metrics: Figures of an `nn.Module` that evaluations report (`ax.Model.metrics`).
            score: A pruning criterion: a function from a tensor's name and fp32 weights to a score
                for each entry, of which the highest are kept.
            optimizer: An update rule (`samo/optim/optimizer.py` explains it), in place of
                `optimizer.name`.
            learning_rate: A peak, or a function from the number of a step, counted from 0 and
                anew after a rewinding, to its learning rate, in place of the section `schedule`. A
                resumed run is given functions again, since no checkpoint contains any.
            quiet: Neither print nor write anything; there is no run directory.
            resume: "auto" continues from the newest complete checkpoint of the run directory if
                there is one; else the path of a run or checkpoint.
            overwrite: Begin anew in the `run_dir` of the settings, and remove the records and
                checkpoints of another run there, once this one is able to train. In a notebook, a
                trainer of this thread that a cell has left there is closed, and saves nothing.
            settings: Settings by the last part of their key, such as `g_inter=2` for
                `layout.g_inter`. They win over `config`.

        Raises, on all ranks alike, ConfigError, DataError, MissingInputError or OutputError, and
        TrainingError where a GPU has no memory for the state.
        """
        job = own_job()
        _reject_default_device()  # also of what ranks exchange
        if isinstance(learning_rate, (int, float, Real)):
            settings["learning_rate"], learning_rate = learning_rate, None
        try:
            given = together(
                job.transport,
                lambda: run_sources(model, data, config, settings, loss, metrics),
                "makes a Trainer",
            )
        except SystemExit as failure:
            job.note_left(failure)
            raise
        given = replace(
            given,
            score=score,
            optimizer=optimizer,
            learning_rate=learning_rate,
            quiet=quiet,
            resume=resume,
            overwrite=overwrite,
        )
        self._prepare(job, given)

    def _prepare(self, job: Job, given: RunSources) -> None:
        """`_build`, after whose failure nothing is left behind."""
        self._job, job.left, self._under_way, self._closed = job, None, "", True
        self._thread = threading.get_ident()
        """The thread that made this trainer, or that trains it."""
        self._process = os.getpid()
        """The process of this trainer; a fork of it has none of its threads."""
        threads = torch.get_num_threads()
        try:
            with ExitStack() as locks, _without_autocast():
                self._build(job, given, locks)
                locks.pop_all()  # the saver releases them
        except BaseException as failure:
            job.note_left(failure)
            raise
        finally:
            _use_threads(threads)
            self._rest()

    # Reason: all that a rank consists of, in order.
    @torch.inference_mode(mode=False)
    @torch.enable_grad()  # whoever calls may have switched gradients off
    def _build(self, job: Job, given: RunSources, locks: ExitStack) -> None:
        """Build all that this rank trains with; errors are as in `__init__`.

        All ranks call this together. A quiet run saves nothing, and no signal stops it.
        """
        # The settings, this rank among the others, and what is to be trained.
        together(job.transport, lambda: reject_arguments(given))
        job.run_dir = job.shown_run_dir = None
        config = check_settings(job, given.config, given.model)
        own = {"learning rate": given.learning_rate, "optimizer": given.optimizer}
        in_place = [f"the {name} of the program" for name, one in own.items() if one is not None]
        notes = [*replaced(config, (*given.given, *in_place))]
        self.placement, config = placed(job, config)
        self.transport = transport = self.placement.transport
        gpu, backoff, opener = self.placement.gpu, transport.backoff, cache(given.open_datasets)
        run_here = None if given.model.example is not None else self.placement.backend.device
        model = together(transport, lambda: with_teacher(given.model, config))
        model = with_example(model, config, transport, opener)
        profile = profile_together(model, config, transport, run_here)

        # The plan of the run, its data, and its directory.
        found = RunDir() if given.quiet else find_run(config, transport, given.resume, locks)
        deciding = partial(
            plan_run,
            *(config, model, profile, transport),
            score=given.score,
            budget=found_budget(config, transport, self.placement.memory),
            saved=None if found.checkpoint is None else found.checkpoint.manifest.pruned,
            on_host=gpu is None,
            optimizer=given.optimizer,
            learning_rate=given.learning_rate,
        )
        self.plan = plan = together(transport, deciding)
        self.coords, self.profile = plan.coords, plan.profile
        coords, resolved = self.coords, self.config
        self._exported_config = with_absolute_paths(resolved)
        table = (*self.placement.table, *launch_warnings(plan, transport), *notes)
        self.placement = replace(self.placement, table=table)
        prepare_process(job, plan, transport)
        pins, saved = self.placement.backend.device.type == "cuda", found.checkpoint
        if saved is not None:  # before the data, which a setting changes
            fits = partial(reject_other_run, saved, plan, config, is_first=transport.rank == 0)
            found = replace(found, notes=(*found.notes, *together(transport, fits)))
        self.data = open_data(plan, config, transport, opener, saved=saved, pinned=pins)
        entry, directory = self.data.entry, None
        together(transport, lambda: check_step(config, entry.name, entry.samples))
        if not given.quiet:
            if given.overwrite and hasattr(sys, "ps1"):
                self._release_others(Path(resolved.run_dir).absolute())
            directory = open_run_directory(
                job, plan, config, found, locks, overwrite=given.overwrite
            )
        shown = None if directory is None else directory.path
        self.run_dir: Path | None = None if directory is None else directory.folder
        """The directory that the run writes to; None of a quiet one."""

        # The layers of the stage, and what computes them.
        self.layers, self.teacher, options = build_state(
            plan, self.placement, self.data, found.checkpoint, self.run_dir
        )
        self.expansion = options.expansion
        """The memory in which sparse weights are expanded; None if all are dense at rest."""
        taught = sum(layer.state.live_bytes().total for layer in self.teacher)
        live = sum(layer.state.live_bytes().total for layer in self.layers)
        live += 0 if self.expansion is None else self.expansion.nbytes
        self.recorder = make_recorder(plan, live, taught, self.data, self.placement, shown)
        self.phases = Phases() if gpu is None else DevicePhases(gpu)
        states = [layer.state for layer in self.layers]
        column = coords.grid.dp_group(coords.stage, coords.tp_rank)
        gradients = transport.collective(f"gradients of stage {coords.stage}", column)
        self.sync = GradientSync(
            states,
            stage_ties(plan, self.layers, transport),
            replicas=gradients,
            wire_dtype=plan.dtype,
            backoff=backoff,
            phases=self.phases,
        )
        self.collector = GradientCollector(states, self.sync.ready, self.phases.compression)
        sharding = options.sharding
        self.tp_group = sharding.group if isinstance(sharding, Sharding) else None
        """The tensor-parallel ranks of this stage, where its layers are sharded."""
        products = stage_products(plan, self.layers, self.collector)
        self.link = stage_link(transport.link(coords), self.tp_group, self.phases, products)
        if self.expansion is not None and self.expansion.gather is not None:
            gather = self.expansion.gather
            gather.idle, gather.timed = self.link.push, partial(self.phases, "collective")
        self.engine = Engine(
            Rank(coords, backoff, self.phases, gpu),
            stage_of_layers(
                *(plan, self.layers, products, self.tp_group, self.expansion), taught=self.teacher
            ),
            self.link,
            schedule=configured_schedule(resolved.pipeline),
            while_idle=self.sync.advance,
            around=self._lockstep(),
        )
        modules = [layer.module for layer in self.layers]
        self.statistics = RunningStatistics(modules, options.replicas)
        self.offload = Offload(gpu, states, backoff) if gpu and resolved.samo.offload else None
        """Brings masters and moments for their update; None if they stay on the device."""
        self.activity = Activity(self.phases, backoff, self.engine.awaited)
        """Shows the watchdog the current task of this rank."""

        # Which entries are kept, and when that changes.
        self.live: LiveMasks | None = None
        """The live masks of this rank's layers; None where nothing ever is pruned."""
        if plan.targets is not None:
            ties = plan.profile.ties
            self.live = LiveMasks(self.layers, ties, plan.targets, options, coords, transport)
        self.pruner = choose_pruner(
            resolved, plan.criterion, self.live, starts_pruned=plan.starts_pruned
        )
        """Draws and changes masks between steps; None leaves them as they are."""
        job.keep_branch(self)
        if found.checkpoint is not None:
            loading = partial(load_state, found.checkpoint, plan, self.layers, self.pruner)
            together(transport, loading)
        if plan.on_host and not plan.memory_is_tight:
            keep_freed_blocks()

        # How far the run is, and who looks after it.
        self.progress = (directory and directory.progress) or Progress.at_start(resolved)
        if not resolved.checkpoint.keep_best:
            self.progress.best = None
        self._evaluated_data = f"{resolved.train.eval_steps} of {self.data.validation_fingerprint}"
        best = self.progress.best
        if best is not None and best.data not in (None, self._evaluated_data):
            self.progress.best = None
            self.recorder.say(
                f"note: the evaluation after step {best.step}, the best one so far, was over other "
                "validation data or another train.eval_steps, and counts no more"
            )
        self.last_evaluation: Evaluation | None = None
        self._stop = job.stop
        self._overwritten = directory if given.overwrite else None
        """The directory of another run, until this one begins there."""
        self._saver: Saver | None = None
        """Saves, as signals ask for; None of a quiet run."""
        if directory is not None:
            self._saver = Saver(
                *(directory, plan, entry, self.layers, self.pruner, self.statistics),
                transport=transport,
                note_progress=self.activity.note_progress,
            )
        job.saved = NOTHING_SAVED
        if self._saver is not None and self._saver.resumed_step is not None:
            self._note_saved(self._saver, self._saver.resumed_step)
        self._watchdog = open_watchdog(
            resolved.watchdog,
            self.run_dir,
            coords=coords,
            activity=self.activity,
            transport=transport,
            reworded=job.reworded,
        )
        self._step = Step(
            *(plan, self.progress, self.data.training, self.layers, self.engine),
            collector=self.collector,
            sync=self.sync,
            weights=WeightGather(gradients, backoff, self.phases),
            statistics=self.statistics,
            replicas=options.replicas,
            offload=self.offload,
            transport=transport,
            phases=self.phases,
            run_dir=directory,
            says=self.recorder.say,
        )
        self._is_stopped = self._closed = False
        self._failed = ""
        """The class of the exception that has ended the run in its middle."""
        self._handled: BaseException | None = None
        """The exception that the program was handling when it made the last call."""
        start = plan.model.start
        self._given = Snapshot(start) if isinstance(start, OwnValues) else None
        self.is_idle = True
        """Whether no loop is under way and the last call was no step."""
        self._is_ended = False
        """Whether a callback has asked to end the run."""
        self._is_ready = False
        """Whether all that stands before the coming step has been done."""
        self._callbacks: dict[str, Callable[[int, Any], object] | None] = {}
        self._live_weights = LiveWeights(plan, self.layers, transport, self.activity.note_progress)
        self._tracing = self._make_tracing()

    @property
    def rank(self) -> int:
        """The number of this rank, from 0; rank 0 gets weights, and is the one to print."""
        return self.coords.rank

    @property
    def steps_done(self) -> int:
        """Steps since the run began, including steps before it was resumed."""
        return self.progress.step

    @property
    def config(self) -> Config:
        """The configuration that is trained by, with every `auto` decided."""
        return self.plan.config

    @property
    def _is_over(self) -> bool:
        return self._is_ended or self.steps_done >= self.config.train.steps

    @property
    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return self._step.learning_rate(self.config.optimizer.learning_rate)

    # -- the loop -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The numbers of the steps that are left, counted from 1, for a loop that calls `step`.

        Between two steps masks change, and the run evaluates, saves and records, as in `train`.
        After the last step the run ends as `train` ends it. A loop that is left before continues
        where another one begins; `close` saves its steps.
        """
        self._reject_closed("the loop")
        return self._steps()

    def _steps(self) -> Iterator[int]:
        done = -1
        try:
            while not self._closed:
                if done == self.steps_done:
                    raise ConfigError(
                        f"trainer: step {done + 1} was not done; call trainer.step() in the loop"
                    )
                self.is_idle = False
                with self._call("step", in_callbacks=False):
                    has_next = self._next()
                if not has_next:
                    return
                done = self.steps_done
                yield done + 1
        finally:
            self.is_idle = True
            self._rest()
        if self._failed:
            self._reject_closed("the loop")

    def _next(self) -> bool:
        """Do the work before the coming step; if none follows, end the run, and return False."""
        if not self._make_ready():
            self._end()
            return False
        return True

    def step(self) -> StepResult:
        """One training step: forward, backward, sums and update, and before it the work between two
        steps, unless the loop has done it.

        The result has `loss` and `grad_norm`, measured before the update. All ranks call this
        together. ConfigError after the last step, or after `close`; StoppedError on all ranks if a
        signal came, once all is saved.
        """
        self._reject_closed("step")
        self.is_idle = self.is_idle and hasattr(sys, "ps1")  # what follows there may be no step
        with self._call("step", in_callbacks=False, meets=not self._is_ready):
            if not self._next():
                raise ConfigError(
                    f"step: the run is over after {self.steps_done} steps; raise train.steps"
                )
            self._is_ready = False
            with self._ending_on_failure():
                return self._recorded_step()

    def train(
        self,
        on_step: OnStep | None = None,
        *,
        on_evaluation: OnEvaluation | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        """Run all steps that are left, with evaluations, checkpoints and records, and close.

        The callbacks are called on every rank, between two steps: `on_step(steps done, result)`
        after each; then `on_checkpoint(step, folder)` for each complete checkpoint, which are
        written in the background; then `on_evaluation(steps done, evaluation)`. An exception in one
        of them ends the run. If one returns True, on any rank, the run ends there as it ends after
        its last step. A run without evaluations warns of an `on_evaluation`, which it never calls.
        StoppedError on all ranks once a signal ends it before the last step and all is saved.
        Within a callback all calls for which a run is between two steps can be made, on every rank:
        `evaluate`, `save` and those that give weights or masks. ConfigError for others.
        """
        self._reject_closed("train")
        given = dict(zip(CALLBACKS, (on_step, on_evaluation, on_checkpoint), strict=True))
        for name, function in given.items():
            way = "give a function; the number of steps is train.steps"
            check_kind(f"train: {name}", function, Callable | None, way)
        with self._call("train", in_callbacks=False), self._ending_on_failure():
            self._callbacks = given
            if on_evaluation is not None and not self._evaluates:
                self.recorder.say(
                    "warning: on_evaluation is never called: there are no validation data, or "
                    "train.eval_steps is 0"
                )
            while self._next():
                self.step()

    @contextmanager
    def _call(self, what: str, *, in_callbacks: bool = True, meets: bool = True) -> Iterator[None]:
        """One call of all ranks together, in the threads of the settings; the watchdog watches.

        ConfigError in a fork, in another call, or in a callback unless `in_callbacks`; and on all
        ranks if one makes another call, unless they have met. At the program's exit, where
        Python ignores exceptions, it ends with a line.
        """
        job, outer = self._job, self._under_way
        self._reject_fork(what)
        if job.is_over:
            write_line(f"error: {what}: the job has ended; call it before the program's exit")
            flush_streams()
            exit_in_c(EXIT_CONFIG)
        is_own = (outer, what) == ("train", "step")
        if outer and not is_own and not (in_callbacks and outer in CALLBACKS):
            raise ConfigError(
                f"{what}: called within {outer} of this trainer, which would go on afterwards; "
                f"call it when {outer} has returned (a callback ends the run by returning True)"
            )
        if what in ("step", "train"):
            self._thread = threading.get_ident()
        if self._saver is not None and not self._closed:
            self._stop.listen()
        threads = torch.get_num_threads()
        if self._watchdog is not None:
            self._watchdog.start()
        job.calls += 1
        self._under_way, self._handled = what, sys.exc_info()[1]
        try:
            if meets:
                meet(self.transport, f"calls {what}() after step {self.steps_done}")
            _use_threads(self.config.train.threads)
            if not is_own:
                self._adopt_writes(is_evaluation=what == "evaluate")
            with _without_autocast():
                yield
            if not outer and not job.in_progress:  # A run in progress is saved by its own calls.
                with self._ending_on_failure():
                    self._heed_signal(is_idle=True)
        except BaseException as failure:
            job.note_left(failure)
            raise
        finally:
            job.calls -= 1
            self._under_way = outer
            _use_threads(threads)
            # Between its calls a run of several ranks is watched, since one may wait for another.
            is_alone = not outer and self.transport.size == 1
            if (
                self._watchdog is not None
                and not self._is_fork
                and (is_alone or self not in job.in_progress)
            ):
                self._watchdog.close()
            self._rest()

    def _rest(self) -> None:
        """Give Ctrl-C back to the program, unless a call or the loop of a trainer is under way."""
        if not self._under_way and all(run.is_idle for run in self._job.in_progress):
            self._job.stop.rest()

    @property
    def _is_fork(self) -> bool:
        """Whether this process is a fork of the trainer's, in whose calls it was made."""
        return os.getpid() != self._process

    def _reject_fork(self, what: str) -> None:
        if self._is_fork:
            raise ConfigError(
                f"{what}: this process is a fork of the rank's, without its threads; call it in "
                "the rank, and end the fork by os._exit()"
            )

    def _reject_closed(self, what: str) -> None:
        if self._closed:
            why = f" since {self._failed} has ended it" if self._failed else ""
            more = "" if self.steps_done < self.config.train.steps else " and a larger train.steps"
            how = "" if self._saver is None else f", with resume='auto'{more} to go on"
            raise ConfigError(f"{what}: the trainer is closed{why}; make another one{how}")

    def _make_ready(self) -> bool:
        """Do the work before the coming step; False if none follows."""
        if not self._is_ready:
            with self._ending_on_failure():
                if self not in self._job.in_progress:
                    together(self.transport, self._follow_program)
                    self._job.in_progress.append(self)
                    if self._stop.misses_signals:
                        self.recorder.say(
                            "note: outside the main thread no signal saves, and SIGTERM ends the "
                            "process at once; a handler of the program's own can have on_step "
                            "return True, which saves"
                        )
                    self._heed_signal()
                elif self._under_way != "train":  # which looks after each callback
                    self._follow_program()
                self._is_ready = self._between_steps()
        return self._is_ready

    @torch.no_grad()
    def _adopt_writes(self, *, is_evaluation: bool = False) -> None:
        for layer in self.layers:
            layer.state.adopt_writes(is_evaluation=is_evaluation)

    def _follow_program(self) -> None:
        """Adopt what the program has written to weights of the copies that train. ConfigError if it
        has changed the modules that it gave by more than trained weights."""
        self._adopt_writes()
        live = self._live_weights
        if self._is_over or self._given is None:
            return
        name = self._given.change(live.may_have, live.may_be_set)
        if name is None:
            return
        place = live.path_to_copies(name)
        way = (
            "change it before, weights by an optimizer of your own (optimizer=), or a copy of the "
            "module"
        )
        raise ConfigError(
            f"model: {name} has changed since the Trainer was made, which trains copies; "
            f"{f'change {place} instead' if place else way}"
        )

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Close if the code within fails; whatever the caller has switched, it has gradients."""
        try:
            with (
                torch.inference_mode(mode=False),
                torch.enable_grad(),
                with_advice(
                    lambda: (
                        f"{self.phases.action or self.activity.task} of step {self.activity.step}"
                    ),
                    self.state_bytes,
                    self.recorder.run.predicted_memory_bytes,
                ),
            ):
                yield
        except BaseException as failure:
            if self._is_fork:
                raise
            self._failed = type(failure).__name__
            try:
                # Every rank raises such an error, so the checkpoint under way is still finished.
                if getattr(failure, "on_all_ranks", False) and self._saver is not None:
                    self._saver.finish()
            finally:
                self._release()
            raise

    def _end(self) -> None:
        """End the run after its last step: all is saved, and the result checked."""
        with self._ending_on_failure():
            self.recorder.flush()
            if self._saver is not None:
                self.activity.at("checkpoint", self.steps_done)
                self._saver.finish()
                self._announce_checkpoints()
            last, pruner, why = self.last_evaluation, self.pruner, None
            if last is not None and not math.isfinite(last.loss):
                way = "lower optimizer.learning_rate, or look at the data"
                why = f"the validation loss is {last.loss}; {way}"
            elif pruner is not None:
                why = pruner.unfinished
            if why is not None:
                raise everywhere(TrainingError(f"step {self.steps_done}: {why}"))
            for line in last_lines(self.progress, self._saver):
                self.recorder.say(line)
        self._release()

    def close(self) -> None:
        """End the run, all threads and the record; evaluations and weights can still be had.

        All ranks call this together. In the middle of a run it saves, as a signal does, so that
        `resume="auto"` continues from here; on several ranks, while an exception is handled that
        came after the last call, it does not, and says so, since other ranks may not have raised
        it. It is safe to call this twice.
        StoppedError on all ranks if a signal came, once all is saved; ConfigError in a callback.
        """
        if self._is_fork:  # whose rank closes it
            return
        raised = sys.exc_info()[1]
        is_failing = self.transport.size > 1 and raised not in (None, self._handled)
        is_in_progress = self in self._job.in_progress and not is_failing
        saver = None if self._closed else self._saver
        if is_failing and saver is not None and self.steps_done not in (0, saver.last_step):
            self.recorder.say(
                f"warning: closed after step {self.steps_done}, which is not saved, since other "
                f"ranks may not have raised {type(raised).__name__}; call close() after its except"
            )
        if not self._closed and (is_in_progress or self._under_way):
            with self._call("close", in_callbacks=False):
                if self._is_over:
                    if self._is_ready or not self._make_ready():
                        self._end()
                elif saver is not None:
                    with self._ending_on_failure():
                        self._save_in_the_middle(saver)
        self._release()

    def _save_in_the_middle(self, saver: Saver) -> None:
        """Save, unless a checkpoint has it all, and say where."""
        recorder = self.recorder
        recorder.flush()
        if self.steps_done not in (0, saver.last_step):
            self.activity.at("checkpoint", self.steps_done)
            saver.start(self.progress)
        self._heed_signal()
        if self._is_stopped:
            self._end_stopped()
        saver.finish()
        self._announce_checkpoints()
        if self.steps_done:
            recorder.say(
                f"closed after step {self.steps_done}, saved in {saver.shown}; resume='auto' goes "
                "on"
            )

    def _release(self) -> None:
        """End threads, hooks (which would keep the model alive) and record; safe to call twice."""
        self._closed, self._handled = True, None
        if self in self._job.in_progress:
            self._job.in_progress.remove(self)
        if self._saver is not None:
            self._saver.close()
            if all(run.run_dir is None for run in self._job.in_progress):
                self._stop.release()
        self._step.close()
        self.collector.close()
        self.recorder.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def _release_others(self, run_dir: Path) -> None:
        """Release the trainers of this directory that a cell of a notebook has left, as one that
        failed in its loop; not one that another thread trains, or that is in a call."""
        for other in self._job.trainers:
            assert isinstance(other, Trainer)
            is_left = other._thread == self._thread and not other._under_way
            if is_left and not other._closed and other.run_dir == run_dir:
                other._release()

    def _between_steps(self) -> bool:
        """Do all that stands between two steps; True if another step follows."""
        # Evaluate even if a signal asked to stop, since the saved weights may have new masks.
        if self._evaluation_is_due() and (
            self._is_over or not self._is_stopped or self.pruner is not None
        ):
            self._recorded_evaluation()
            self._heed_signal()
        is_over = self._is_over
        stops = self._is_stopped and not is_over
        if not is_over and not self.progress.masked:
            self._change_masks()
        saver = self._saver
        is_due = saver is not None and (
            saver.due(self.steps_done, is_last=is_over)
            or (self.progress.is_best and saver.last_step != self.steps_done)
        )
        is_in_place = self._overwritten is None  # of another run, which stays until this one trains
        if saver is not None and ((stops and is_in_place) or is_due):
            self.recorder.flush()
            self.activity.at("checkpoint", self.steps_done)
            saver.start(self.progress)
        if stops:
            self._end_stopped()
        if not is_over:
            self._begin()
        return not is_over

    def _begin(self) -> None:
        """Compare the layers before the first step, and then begin in the directory."""
        if self._step.checks_layers:
            self.activity.at("training", self.steps_done + 1)
            self._step.check_layers()
        self._overwrite()

    def _overwrite(self) -> None:
        """Remove what another run has left in the directory, if the user wants that."""
        directory, self._overwritten = self._overwritten, None
        if directory is not None:
            begins = self.rank == 0
            together(self.transport, lambda: directory.begin(self.config) if begins else None)

    def _evaluation_is_due(self) -> bool:
        settings, step = self.config.train, self.steps_done
        if self.progress.evaluated:
            return False
        if step == 0:
            return settings.eval_first
        every = settings.eval_every
        return self._is_over or (every > 0 and step % every == 0)

    def evaluate(self) -> Evaluation | None:
        """Loss and metrics over `train.eval_steps` global batches of validation data.

        All ranks call this together, before, between or after steps; the training state does not
        change. None if there is no validation data, or if `train.eval_steps` is 0. ConfigError on
        all ranks if one makes another call meanwhile, and after a failed step; StoppedError if a
        signal came and no run is in progress.
        """
        if self._failed:
            self._reject_closed("evaluate")
        if not self._evaluates:
            return None
        with self._call("evaluate"):
            self.activity.at("evaluation", self.steps_done)
            self.last_evaluation = self._evaluated(self.config.train.eval_steps)
        return self.last_evaluation

    def save(self) -> Path:
        """Write a checkpoint now, and return its folder once it is complete.

        All ranks call this together, before, between or after steps, and before `close`.
        `axsparse export` and `ax.export` take the weights out of it. Raises, on all ranks alike,
        ConfigError for a trainer without a run directory, OutputError.
        """
        if self._saver is None:
            raise ConfigError("save: a quiet trainer has no run directory; make it without quiet")
        self._reject_closed("save")
        with self._call("save"):
            self._overwrite()
            self.activity.at("checkpoint", self.steps_done)
            self._saver.start(self.progress)
            self._saver.finish()
            self._note_saved(self._saver, self.steps_done)
        return path_of(self._saver.folder, self.steps_done)

    def save_mask(self, path: str | Path) -> None:
        """Write which entries are kept now as a mask file, the same in every layout.

        `pruning.mask` reads it. All ranks call this together, between steps.

        Raises, on all ranks alike, ConfigError if nothing is pruned, OutputError.
        """
        live = self.live
        if live is None:
            raise ConfigError("mask file: nothing of this model is pruned; set pruning.sparsity")
        with self._call("save_mask"):
            self.activity.at("masks", self.steps_done)
            live.save(path)

    def save_hf(self, path: str | Path, *, force: bool = False) -> None:
        """Write the model as a Hugging Face folder, as `axsparse export --to hf` does.

        The values are the fp32 masters, zero where pruned. `force` replaces an earlier folder. All
        ranks call this together, before, between or after steps; rank 0 needs memory for the full
        model. Raises, on all ranks alike, ConfigError for a model that transformers does not have,
        and OutputError.
        """

        def write() -> None:
            if found is not None:
                notes = save_folder(
                    self._exported_config,
                    self.profile.shapes,
                    found,
                    self.data.entry,
                    Path(expanded(path)),
                    step=self.steps_done,
                    force=force,
                )
                for note in notes:
                    self.recorder.say(note)

        with self._call("save_hf"):
            found = self._collected()
            together(self.transport, write)

    def state_dict(self) -> dict[str, Tensor] | None:
        """All weights and buffers as `ax.load` gives them for a checkpoint, on rank 0; None on
        the others. All ranks call this together, before, between or after steps."""
        with self._call("state_dict"):
            return self._collected()

    def _collected(self, *, caches: bool = False) -> dict[str, Tensor] | None:
        self.activity.at("weights", self.steps_done)
        return self._live_weights.collect(caches=caches)

    def model(self) -> nn.Module | None:
        """The model as a module of plain torch on the CPU, on rank 0; None on the others.

        If the model was made from a module of a user's class, the result is of that class, with all
        attributes that the user has set; a model of transformers has transformers' class.

        Its weights are copies of the fp32 masters, zero where pruned, and its numbers those that
        the layers have. It is in evaluation mode, and its state dict has the global names. All
        ranks call this together, before, between or after steps; rank 0 needs memory for the full
        model. ConfigError for a layer that has a dot in its name.
        """
        model = self.plan.model
        if model.container is None:
            reject_dotted_names(model)
        with self._call("model"):
            tensors = self._collected(caches=True)
            numbers = self._live_weights.set_numbers()
        if tensors is None or numbers is None:
            return None
        return with_numbers(plain_model(model, self.profile.ties, tensors), numbers)

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state, the weights of a teacher included."""
        state = sum(
            (layer.state.live_bytes() for layer in (*self.layers, *self.teacher)), StateBytes()
        )
        return state + StateBytes(
            staged=0 if self.offload is None else self.offload.nbytes,
            expanded=0 if self.expansion is None else self.expansion.nbytes,
        )

    # -- details ------------------------------------------------------------------------

    def _lockstep(self) -> Callable[[Policy, bool], Policy]:
        """The function that has policies of this rank run the actions of other ranks' ones: of its
        tensor-parallel group, and in training of all replicas where these gather weights and
        arrivals decide the order."""
        coords, grid = self.coords, self.coords.grid
        transport, on_gpus = self.placement.transport, self.placement.gpu is not None

        def broadcast(replicas: Iterable[int]) -> ActionBroadcast | None:
            every = itertools.product(replicas, range(grid.g_tensor))
            ranks = [grid.rank(coords.stage, *member) for member in every]
            if len(ranks) == 1:
                return None
            group = transport.collective(f"actions of {len(ranks)} ranks", ranks)
            return ActionBroadcast(group, transport.backoff, on_gpus=on_gpus)

        evaluating = training = broadcast([coords.replica])
        is_driven = grid.g_inter > 1 and self.config.pipeline.schedule == "message-driven"
        if is_driven and self.plan.gathers_weights:
            training = broadcast(range(grid.g_data))

        def around(policy: Policy, is_evaluation: bool) -> Policy:
            actions = evaluating if is_evaluation else training
            return policy if actions is None else Lockstep(actions, action, policy)

        return around

    def _recorded_step(self) -> StepResult:
        self.activity.at("training", self.steps_done + 1)
        if self._tracing is not None:
            self._tracing.begin(self.steps_done + 1)
        self.phases.begin_step()
        rate, before = self.learning_rate, self._bytes_sent()
        scale = self.progress.loss_scale
        saver = self._saver
        verdict = self._step.train_step(
            lambda: NOTHING if saver is None else Flags(self._stop.is_set, saver.is_writing)
        )
        self._is_stopped = verdict.notice.stop
        if saver is not None:
            saver.advance(any_writing=verdict.notice.writing)
        gradient_bytes, p2p_bytes = (
            after - start for after, start in zip(self._bytes_sent(), before, strict=True)
        )
        figures = StepFigures(
            step=self.steps_done,
            loss=verdict.loss,
            learning_rate=rate,
            grad_norm=verdict.grad_norm,
            loss_scale=scale,
            weights_digest=verdict.digest,
            skip_reason=None if verdict.finite else self._step.culprit(verdict),
            skipped_steps=self.progress.not_finite,
        )
        maxima = {
            "model_state_bytes": self.state_bytes().total,
            "gradient_bytes_sent": gradient_bytes,
            "p2p_bytes_sent": p2p_bytes,
            "peak_memory_bytes": self.placement.peak_memory_bytes(),
        }
        seconds = self.phases.end_step()
        if self._tracing is not None:
            self._tracing.end(self.steps_done)
        self.recorder.step(figures, seconds, maxima)
        self._call_back("on_step", "after step", self.steps_done, verdict)
        self._announce_checkpoints()
        self.activity.steps += 1
        return verdict

    def _call_back(self, name: str, when: str, step: int, value: object) -> None:
        """Call a callback on all ranks together, if there is one; True of any rank ends the run."""
        callback = self._callbacks.get(name)
        if callback is not None:
            # A callback may switch gradients off: the end of the block switches them on again.
            with note_errors(f"{name} {when} {step}"), torch.enable_grad(), self._within(name):
                answer = callback(step, value)
                self._reject_fork(name)
                self._follow_program()
            kind = str(getattr(answer, "dtype", type(answer).__name__))
            ends = kind in ("bool", "torch.bool") and bool(answer)
            if meet(self.transport, f"returns from {name}", value=ends) and not self._is_over:
                self._is_ended = True
                total = self.config.train.steps
                self.recorder.say(f"{name} ends the run after step {self.steps_done}/{total}")

    @contextmanager
    def _within(self, callback: str) -> Iterator[None]:
        """Allow what a callback may call."""
        outer, self._under_way = self._under_way, callback
        try:
            yield
        finally:
            self._under_way = outer

    def _announce_checkpoints(self) -> None:
        if self._saver is not None:
            for step in self._saver.take_complete():
                self._note_saved(self._saver, step)
                folder = path_of(self._saver.folder, step)
                self._call_back("on_checkpoint", "of step", step, folder)

    def _note_saved(self, saver: Saver, step: int) -> None:
        """Have an interruption name a checkpoint of this run."""
        self._job.saved = f"{path_of(saver.shown, step)} is kept, and {RESUME_AUTO} goes on"

    @property
    def _evaluates(self) -> bool:
        return self.data.validation is not None and self.config.train.eval_steps != 0

    def _evaluated(self, number: int | Literal["all"]) -> Evaluation:
        """The evaluation of some batches; there are validation data."""
        validation = self.data.validation
        assert validation is not None
        with self.statistics.of_first_replica(evaluates=True):
            return evaluate(
                self.engine,
                validation,
                number,
                tuple(self.plan.model.metrics),
                transport=self.transport,
                coords=self.coords,
            )

    def _recorded_evaluation(self) -> None:
        with self._within("on_evaluation"):
            evaluation = self.evaluate()
        if not self._is_over:
            self._begin()
        # What is not finite is found again by a resume, which ends likewise.
        self.progress.evaluated = evaluation is None or math.isfinite(evaluation.loss)
        if evaluation is not None:
            if self.config.checkpoint.keep_best:
                self.progress.look(evaluation.loss, self._evaluated_data)
            part = evaluation.samples < evaluation.available
            said = f"{evaluation.samples} of {evaluation.available} samples" if part else ""
            self.recorder.evaluation(self.steps_done, evaluation.loss, evaluation.metrics, said)
            self._call_back("on_evaluation", "after step", self.steps_done, evaluation)

    def _change_masks(self) -> None:
        """Let the pruning method change the masks, and adapt all that depends on them."""
        self.progress.masked = True
        pruner = self.pruner
        if pruner is None:
            return
        before, number = self.state_bytes().total, self.config.pruning.eval_steps
        self.activity.at("masks", self.steps_done)

        def loss() -> float | None:
            evaluates = number != 0 and self.data.validation is not None
            return self._evaluated(number).loss if evaluates else None

        done, progress = self.steps_done, self.progress
        change = pruner.before_step(
            StepContext(done, progress.updates, self._step.score_gradients, loss)
        )
        self._step.restore_weights()
        if change is None:
            return
        self._step.follow_masks(change)
        self._begin()
        sizes = [before, self.state_bytes().total]
        rows = gather_numbers(self.transport, sizes)
        old, new = (int(max(column)) for column in zip(*rows, strict=True))
        self.recorder.masks(MaskRecord(done, change.text, dict(change.figures), new, old))
        if change.is_final and self.run_dir is not None:
            assert self.live is not None, "masks have changed"
            self.live.save(self.run_dir / MASK_FILE)

    def _bytes_sent(self) -> tuple[int, int]:
        """Bytes that were sent so far to other replicas, and to other stages and shards."""
        sync, tp_group = self.sync, self.tp_group
        of_group = 0 if tp_group is None else tp_group.bytes_sent
        others = self.link.bytes_sent + sync.tie_bytes_sent + of_group
        gather = None if self.expansion is None else self.expansion.gather
        gathered = 0 if gather is None else gather.bytes_sent
        return sync.replicas.bytes_sent + gathered, others

    def _heed_signal(self, *, is_idle: bool = False) -> None:
        """Learn outside of a step whether a rank was asked to stop; StoppedError if nothing is to
        be saved, as while no run is in progress (`is_idle`)."""
        saver = self._saver
        if saver is None or self._closed or (self._is_over and not is_idle):
            return
        if sum_of(self.transport, [float(self._stop.is_set)]) == [0.0]:
            return
        if is_idle or self.steps_done in (0, saver.resumed_step):
            self._end_stopped()
        self._is_stopped = True

    def _end_stopped(self) -> None:
        """Wait for the checkpoint under way, then raise StoppedError on all ranks."""
        saver = self._saver
        assert saver is not None, "signals are taken where there is a place to save"
        saver.finish()
        self._announce_checkpoints()
        if all(run is self or run.run_dir is None for run in self._job.in_progress):
            self._stop.forget()
        if self.steps_done == 0:
            raise StoppedError(
                "stopped before the first step, with nothing to save; start it again"
            )
        raise StoppedError(
            f"stopped after step {self.steps_done}, saved in {saver.shown}; {RESUME_AUTO} goes on"
        )

    def _make_tracing(self) -> TraceRecorder | None:
        """Traces some steps, but not this run's first, which compiles; None if none is wanted."""
        train = self.config.train
        if train.trace == 0 or self.run_dir is None:
            return None
        last = min(self.steps_done + 1 + train.trace, train.steps)
        steps = range(min(self.steps_done + 2, last), last + 1)
        return TraceRecorder(self.transport, self.coords, self.phases, self.run_dir, steps)


def build(
    job: Job, model: Model, open_datasets: Callable[[], Datasets], config: Config, **how: Any
) -> Trainer:
    """A trainer on a rank of a job that is connected already; `how` is for `RunSources`."""
    trainer = Trainer.__new__(Trainer)
    trainer._prepare(job, RunSources(model, open_datasets, config, **how))
    return trainer


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Switch off the caller's `torch.autocast`, whose casts of weights outlive an update."""
    with ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False, cache_enabled=False))
        yield


def _reject_default_device() -> None:
    """ConfigError if the program creates tensors on another device than the CPU by default."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise ConfigError(
            f"torch's default device: {device}; a Trainer puts layers and batches on the device of "
            "its rank; call it outside torch.device, and after torch.set_default_device(None)"
        )


def _use_threads(number: int) -> None:
    """Have torch compute in `number` threads. Setting the number that it has would empty oneDNN's
    cache of compiled products."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


CALLBACKS = ("on_step", "on_evaluation", "on_checkpoint")
OnStep = Callable[[int, StepResult], object]
"""`on_step(steps done, verdict)`, after each step; True ends the run."""
OnEvaluation = Callable[[int, Evaluation], object]
"""`on_evaluation(steps done, evaluation)`, after each evaluation; True ends the run."""
OnCheckpoint = Callable[[int, Path], object]
"""`on_checkpoint(step, folder)`, once the checkpoint of a step is complete; True ends the run."""


def last_lines(progress: Progress, saver: Saver | None) -> Iterator[str]:
    """How many steps were skipped, if any were, and where the result is."""
    if progress.not_finite:
        yield (
            f"of {progress.step} steps: {progress.not_finite} skipped with numbers that were not "
            "finite"
        )
    if saver is None:
        return
    run = saver.shown.parent
    if progress.best is not None:
        yield (
            f"lowest validation loss {progress.best.loss:.4f} after step {progress.best.step}, "
            f"kept in {path_of(saver.shown, progress.best.step)}"
        )
    if saver.last_step == progress.step:
        named = shlex.quote(str(run))
        yield (
            f"saved in {saver.shown}  ·  axsparse report {named} draws it  ·  axsparse export "
            f"{named} --to torch --out weights.safetensors takes the weights out"
        )
