"""From a configuration, a model and data to a trainer: from its start, or where it stood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from axsparse.config.load import LoadedConfig, made_in_python
from axsparse.config.schema import Config
from axsparse.config.validate import check_config, check_gpu_settings
from axsparse.data.dataset import Datasets
from axsparse.models.layer import Layer, Model
from axsparse.models.survey import Survey, costs_text, survey, with_costs
from axsparse.observe.out_of_memory import explained, record_history
from axsparse.observe.watchdog.watchdog import open_watchdog
from axsparse.planner.auto_layout import pruned_layout
from axsparse.pruning.criteria import Score
from axsparse.pruning.methods.live_masks import masks_of_start, stage_total
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.process_memory import give_back_at_once
from axsparse.runtime.provenance import git_hash, versions
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers, start_values
from axsparse.samo.masks import Masks
from axsparse.samo.precision import DTYPES
from axsparse.samo.shards import Replicas
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.assembly import assemble
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS
from axsparse.training.checkpoint.compatibility import (
    refuse_other_data,
    refuse_other_model,
    refuse_other_settings,
)
from axsparse.training.checkpoint.manifest import DataEntry, Progress
from axsparse.training.checkpoint.restore import CheckpointMasks, Files, load_layers
from axsparse.training.checkpoint.saver import RunFacts, Saver
from axsparse.training.checkpoint.verification import Checkpoint
from axsparse.training.open_data import Data, open_data
from axsparse.training.parts import Parts
from axsparse.training.placement import Placement, found_memory, place
from axsparse.training.rank_facts import facts_of, refuse_odd_rank
from axsparse.training.resolution import RunSpec, resolve
from axsparse.training.run_directory import PastRun, RunDir, find_run, open_run_dir
from axsparse.training.run_recorder import make_recorder
from axsparse.training.spikes import RewindOrder, without_base
from axsparse.training.trainer import Trainer


def build(
    job: Job,
    model: Model,
    open_datasets: Callable[[], Datasets],
    config: Config | LoadedConfig,
    *,
    grid: Grid | None = None,
    score: Score | None = None,
    quiet: bool = False,
    resume: str | None = None,
    back: RewindOrder | None = None,
) -> Trainer:
    """A trainer on every rank of the job; all ranks call this together with equal arguments.

    `open_datasets` is called on first and last stages only. Without `grid`, the layout of
    the configuration decides. `score` is a pruning criterion of one's own: a function from a
    tensor's name and fp32 weights to a score an entry, of which the highest are kept. `quiet`
    neither prints nor writes anything. `resume`: "auto" goes on from the run directory's newest
    whole checkpoint, if there is one; a path from that run or checkpoint. `back`: where a spike
    of the loss sends a run that resumes; checkpoints after that go.

    Raises, on all ranks alike, ConfigError, DataError, MissingInputError or OutputError, and
    TrainingError where a GPU has no room for the state.
    """
    together(job.transport, lambda: _refuse_other_types(model, open_datasets, config, grid))
    loaded = config if isinstance(config, LoadedConfig) else made_in_python(config, model.name)
    together(job.transport, lambda: check_config(loaded))
    placement = job.placement
    if not isinstance(placement, Placement):
        job.placement = placement = place(job.transport, loaded)
    transport = job.branch()
    placement = replace(placement, transport=transport)
    has_gpu = placement.gpu is not None
    together(transport, lambda: check_gpu_settings(loaded, has_gpu=has_gpu))
    if loaded.config.train.memory_history:
        record_history()
    surveyed = _survey(model, DTYPES[loaded.config.precision], transport)
    together(transport, lambda: _refuse_quiet(loaded, resume) if quiet else None)
    upto = None if back is None else back.base
    past = None if quiet else find_run(loaded, transport, resume, upto)
    checkpoint = None if past is None else past.checkpoint
    progress = None if past is None else _progress_of(past, back)
    settings = _settings_of(loaded, checkpoint)
    memory = found_memory(settings.config, transport, placement.room)
    saved = None if checkpoint is None else checkpoint.manifest.pruned
    run = together(
        transport,
        lambda: resolve(
            settings, surveyed, transport, grid, score, memory, saved, on_host=not has_gpu
        ),
    )
    job.where = str(run.place)
    together(transport, lambda: refuse_odd_rank(transport, facts_of(run.config, run.survey)))
    torch.set_num_threads(run.config.train.threads)
    if run.memory_is_tight:
        give_back_at_once()
    data = open_data(
        run, loaded, transport, open_datasets, words=model.vocab_size, pinned=placement.pins
    )
    facts = _facts(run, data)
    opened = None if past is None else _open_run_dir(run, settings, facts, job, past, back)
    column = run.place.grid.column(run.place.stage)
    replicas = Replicas(
        transport.collective(f"agreements of stage {run.place.stage}", column),
        transport.backoff,
        shard=run.config.samo.shard_optimizer,
    )
    options = _options(run, model, replicas, placement)
    own = [model.layers[number] for number in run.stages[run.place.stage]]
    masks: Masks | None
    if checkpoint is None:
        masks = _masks_of_start(run, own, options, transport)
    else:
        masks = CheckpointMasks(checkpoint)
    layers = together(
        transport, lambda: _construct(run, own, replace(options, masks=masks), job.run_dir)
    )
    recorder = make_recorder(run, model.name, layers, data, placement, job.run_dir)
    if back is not None and progress is not None:
        recorder.went_back(back.record(progress))
    parts = assemble(run, model, layers, options, data, placement, recorder, job.run_dir)
    job.keep_branch(parts)
    if checkpoint is not None:
        together(transport, partial(_load, checkpoint, parts))
    if opened is None:
        return Trainer(run.config, parts)
    saver = Saver(
        opened.path / CHECKPOINTS,
        run.config.checkpoint,
        facts,
        transport=transport,
        place=run.place,
        survey=run.survey,
        layers=layers,
        buffers=parts.buffers,
        masking=parts.masking,
        lock=opened.lock,
        written=parts.pulse.beat,
        resumed_at=None if progress is None else progress.step,
    )
    watchdog = open_watchdog(
        run.config.watchdog, opened.path, place=run.place, pulse=parts.pulse, transport=transport
    )
    return Trainer(
        run.config, parts, saver=saver, stop=job.stop, watchdog=watchdog, progress=progress
    )


def _refuse_other_types(model: object, open_datasets: object, config: object, grid: object) -> None:
    """ConfigError for arguments that would only be found to be no such thing deep within."""
    for name, value, is_right, right in (
        ("model", model, isinstance(model, Model), "a Model; from_sequential makes one of modules"),
        (
            "config",
            config,
            isinstance(config, (Config, LoadedConfig)),
            "what configure makes of a dict",
        ),
        ("grid", grid, grid is None or isinstance(grid, Grid), "Grid(g_inter, g_data)"),
        ("open_datasets", open_datasets, callable(open_datasets), "a function returning Datasets"),
    ):
        if not is_right:
            raise ConfigError(f"build: {name} is {type(value).__name__}; give {right}")


def _facts(run: RunSpec, data: Data) -> RunFacts:
    """What a checkpoint says of the run; git is asked on the rank that writes it."""
    return RunFacts(
        data=DataEntry(
            name=data.name,
            fingerprint=data.fingerprint,
            samples=data.training.num_samples,
            position=0,
        ),
        samples_per_step=run.config.batch.global_batch_size,
        config=run.config.model_dump(mode="json"),
        versions=versions(),
        git=git_hash() if run.place.rank == 0 else None,
    )


def _refuse_quiet(loaded: LoadedConfig, resume: str | None) -> None:
    """ConfigError for what needs a place to save, where there is none."""
    if resume is not None:
        raise ConfigError(
            "build: resume goes on in a run directory, and quiet has none; leave one of them out"
        )
    if loaded.config.spikes.rule == "back":
        raise ConfigError(
            f"{loaded.where('spikes.rule')}: back goes back to a checkpoint, and quiet saves none; "
            "choose skip, or leave quiet out"
        )
    if loaded.config.layout.g_inter_pruned is not None:
        raise ConfigError(
            f"{loaded.where('layout.g_inter_pruned')}: goes on from a checkpoint, and quiet saves "
            "none; leave one of them out"
        )


def _progress_of(past: PastRun, back: RewindOrder | None) -> Progress | None:
    """Where training stands; None at its start."""
    if past.checkpoint is None:
        return None
    progress = past.checkpoint.manifest.progress
    if past.path is None:
        return without_base(progress)
    return progress if back is None else back.applied(progress)


def _settings_of(loaded: LoadedConfig, checkpoint: Checkpoint | None) -> LoadedConfig:
    """The configuration, with the layout for pruned networks where that is what goes on."""
    if loaded.config.layout.g_inter_pruned is None or checkpoint is None:
        return loaded
    return pruned_layout(loaded) if checkpoint.manifest.standing.is_done else loaded


def _open_run_dir(
    run: RunSpec,
    loaded: LoadedConfig,
    facts: RunFacts,
    job: Job,
    past: PastRun,
    back: RewindOrder | None,
) -> RunDir:
    """The run directory, with all that is known at the start in it; signals save from here on.

    A checkpoint that does not fit is refused before anything in the directory changes.
    """
    transport = job.transport

    def fits() -> list[str]:
        if past.checkpoint is None:
            return []
        refuse_other_model(past.checkpoint, run.survey)
        refuse_other_data(past.checkpoint, facts.data)
        return refuse_other_settings(past.checkpoint, run.config, loaded)

    def begin() -> None:
        if transport.rank == 0:
            opened.begin(run.config, _progress_of(past, back), is_back=back is not None)

    told = together(transport, fits)
    opened = open_run_dir(loaded, transport, past)
    together(transport, begin)
    if transport.rank == 0:
        for line in (*opened.notes, *told):
            print(f"axsparse: {line}", flush=True)
    job.run_dir = opened.path
    job.stop.listen()
    return opened


def _load(checkpoint: Checkpoint, parts: Parts) -> None:
    """The state of this rank, and where its pruning method stood."""
    load_layers(checkpoint, parts.layers, parts.survey.ties)
    if parts.masking is not None:
        parts.masking.restore(checkpoint.manifest.standing, Files(checkpoint).read_masking)


def _survey(model: Model, dtype: torch.dtype, transport: Transport) -> Survey:
    """The survey on every rank; one of them runs the layers for what they cost, since that takes
    a second of every process."""
    runs = transport.rank == 0
    seen = model if runs else replace(model, example=None)
    surveyed = together(transport, lambda: survey(seen, dtype))
    names = ", ".join(layer.name for layer in surveyed.layers)
    together(transport, lambda: refuse_odd_rank(transport, {"layers": names}))
    costs = costs_text(surveyed) if runs else ""
    return with_costs(surveyed, gather_texts(transport.world, transport.backoff, costs)[0])


def _options(run: RunSpec, model: Model, replicas: Replicas, placement: Placement) -> StateOptions:
    backend = placement.backend
    if run.config.samo.offload:
        assert placement.gpu is not None, "the settings were checked"
        backend = replace(backend, host=placement.gpu.pinned)
    return StateOptions(
        dtype=run.dtype,
        gradient_dtype=run.gradient_dtype,
        split_master=run.config.samo.split_master,
        moments=run.optimizer.moments,
        seed=run.config.seed,
        masks=None,
        index=run.index,
        replicas=replicas,
        start=model.start,
        backend=backend,
    )


def _construct(
    run: RunSpec, own: Sequence[Layer], options: StateOptions, run_dir: Path | None
) -> list[BuiltLayer]:
    """The layers of this stage; TrainingError where a GPU has no room for their state."""
    planned = None if run.prediction is None else run.prediction.memory_bytes
    with explained(run.place.rank, lambda: f"building {run.place}", StateBytes, planned, run_dir):
        return build_layers(own, run.survey.ties, options)


def _masks_of_start(
    run: RunSpec, own: Sequence[Layer], options: StateOptions, transport: Transport
) -> Masks | None:
    """The masks that state is built with; None where it starts dense.

    Not `together`: ranks agree on a common threshold on the way, and one that fails ends all.
    """
    if not run.starts_pruned or run.ticket is not None:
        return run.ticket
    assert run.targets is not None
    ties = run.survey.ties
    values = (
        value
        for layer in own
        for value in start_values(layer, ties, options).items()
        if value[0] not in ties
    )
    total = partial(stage_total, run.place, transport)
    return masks_of_start(run.targets, run.criterion, values, total)
