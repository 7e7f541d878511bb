"""From a configuration, a model and data to a trainer: joins the parts of one rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from axsparse.comm import Collective, Transport
from axsparse.config.load import Loaded
from axsparse.config.schema import Config
from axsparse.config.validate import check_config
from axsparse.data_parallel.agreement import gather_texts, sum_by_owner
from axsparse.data_parallel.buffers import StageBuffers
from axsparse.data_parallel.sharded import WeightGather
from axsparse.data_parallel.sync import GradientSync, StageTie, Use
from axsparse.grid import Grid
from axsparse.job import Job, together
from axsparse.masking.choose import choose_masking
from axsparse.masking.live import Live, masks_of_start, stage_total
from axsparse.models.layer import Layer, Model
from axsparse.models.survey import Survey, costs_text, survey, with_costs
from axsparse.observe.banner import banner
from axsparse.observe.console import format_count, make_console
from axsparse.observe.metrics import MetricsFile
from axsparse.observe.phases import Phases
from axsparse.observe.recorder import Recorder, RunFigures
from axsparse.pipeline.engine import Engine
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.pruning.criteria import Score
from axsparse.pruning.masks import Masks
from axsparse.resolve import DTYPES, Resolved, loss_scale, resolve
from axsparse.samo.construct import BuiltLayer, StateOptions, construct, start_values
from axsparse.samo.gradient import GradientCollector
from axsparse.samo.shards import Replicas
from axsparse.startup import (
    METRICS_FILE,
    Data,
    Datasets,
    facts_of,
    open_data,
    prepare_run_dir,
    refuse_odd_rank,
)
from axsparse.trainer import Parts, Trainer


def build(
    job: Job,
    model: Model,
    open_datasets: Callable[[], Datasets],
    config: Config | Loaded,
    *,
    grid: Grid | None = None,
    score: Score | None = None,
    quiet: bool = False,
) -> Trainer:
    """A trainer on every rank of the job; all ranks call this together with equal arguments.

    `open_datasets` is called on first and last stages only. Without `grid`, the layout of
    the configuration decides. `score` is a pruning criterion of one's own: a function from a
    tensor's name and fp32 weights to a score an entry, of which the highest are kept. `quiet`
    neither prints nor writes anything.

    Raises, on all ranks alike, ConfigError, DataError, MissingInputError or OutputError.
    """
    transport = job.transport
    loaded = config if isinstance(config, Loaded) else Loaded(config, model.name, {})
    together(transport, lambda: check_config(loaded))
    surveyed = _survey(model, DTYPES[loaded.config.precision], transport)
    run = together(transport, lambda: resolve(loaded, surveyed, transport, grid, score))
    job.where = str(run.place)
    together(transport, lambda: refuse_odd_rank(transport, facts_of(run.config, run.survey)))
    torch.set_num_threads(run.config.train.threads)
    data = open_data(run, loaded, transport, open_datasets)
    job.run_dir = None if quiet else prepare_run_dir(run.config, loaded, transport)
    column = run.place.grid.column(run.place.stage)
    replicas = Replicas(
        transport.collective(f"agreements of stage {run.place.stage}", column),
        transport.backoff,
        shard=run.config.samo.shard_optimizer,
    )
    options = _options(run, model, replicas)
    own = [model.layers[number] for number in run.stages[run.place.stage]]
    masks = _masks_of_start(run, own, options, transport)
    layers = together(
        transport, lambda: construct(own, run.survey.ties, replace(options, masks=masks))
    )
    recorder = _recorder(run, model.name, layers, data, transport, job.run_dir)
    parts = _join(run, model, layers, options, data, transport, recorder)
    return Trainer(run.config, parts)


def _survey(model: Model, dtype: torch.dtype, transport: Transport) -> Survey:
    """The survey on every rank; one of them runs the layers for what they cost, since that takes
    a second of every process."""
    runs = transport.rank == 0
    seen = model if runs else replace(model, example=None)
    surveyed = together(transport, lambda: survey(seen, dtype))
    costs = costs_text(surveyed) if runs else ""
    return with_costs(surveyed, gather_texts(transport.world, transport.backoff, costs)[0])


def _options(run: Resolved, model: Model, replicas: Replicas) -> StateOptions:
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
    )


def _masks_of_start(
    run: Resolved, own: Sequence[Layer], options: StateOptions, transport: Transport
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


def _join(
    run: Resolved,
    model: Model,
    layers: list[BuiltLayer],
    options: StateOptions,
    data: Data,
    transport: Transport,
    recorder: Recorder,
) -> Parts:
    """The parts of one rank, each given the others that it needs."""
    place, config, phases, replicas = run.place, run.config, Phases(), options.replicas
    states = [layer.state for layer in layers]
    column = place.grid.column(place.stage)
    gradients = transport.collective(f"gradients of stage {place.stage}", column)
    ties = _stage_ties(run, layers, transport)
    sync = GradientSync(
        states,
        ties,
        replicas=gradients,
        wire_dtype=run.dtype,
        backoff=transport.backoff,
        phases=phases,
    )
    stage = Stage(
        layers,
        loss=model.loss if place.is_last else None,
        metrics=model.metrics if place.is_last else {},
        input_dtype=run.dtype if place.is_first else None,
        seed=config.seed,
        checkpoint_activations=config.pipeline.checkpoint_activations,
    )
    link = transport.link(place)
    pipeline = config.pipeline
    assert pipeline.slack != "auto"
    engine = Engine(
        place,
        stage,
        link,
        transport.backoff,
        phases,
        schedule=Schedule(pipeline.schedule, pipeline.slack, pipeline.prefer),
        while_idle=sync.advance,
    )
    collector = GradientCollector(states, sync.ready, lambda: phases("compress"))

    def live() -> Live:
        assert run.targets is not None
        pattern = run.criterion.pattern
        return Live(layers, run.survey.ties, run.targets, pattern, options, place, transport)

    return Parts(
        transport=transport,
        place=place,
        survey=run.survey,
        stage_of=run.stage_of,
        layers=layers,
        engine=engine,
        link=link,
        collector=collector,
        sync=sync,
        replicas=replicas,
        weights=WeightGather(gradients, transport.backoff, phases),
        buffers=StageBuffers([layer.module for layer in layers], replicas),
        optimizer=run.optimizer,
        loss_scale=loss_scale(config),
        masking=choose_masking(run, live, collector, ties),
        training=data.training,
        validation=data.validation,
        metrics=tuple(model.metrics),
        phases=phases,
        recorder=recorder,
    )


def _stage_ties(
    run: Resolved, layers: Sequence[BuiltLayer], transport: Transport
) -> list[StageTie]:
    """The ties with a use on this stage, in an order that all stages share."""
    place = run.place
    tensors = {
        tensor.name: Use(layer.state, tensor) for layer in layers for tensor in layer.state.tensors
    }
    pairs: dict[tuple[int, int], Collective] = {}
    found = []
    for second, first in run.survey.ties.items():
        uses = tuple(tensors[name] for name in (first, second) if name in tensors)
        if not uses:  # on other stages, or frozen
            continue
        stages = (run.stage_of(first), run.stage_of(second))
        if stages[0] != stages[1] and stages not in pairs:
            ranks = [place.grid.rank(stage, place.replica) for stage in stages]
            pairs[stages] = transport.collective(f"tie {first}", ranks)
        found.append(StageTie(uses, pairs.get(stages)))
    return found


def _recorder(
    run: Resolved,
    model_name: str,
    layers: Sequence[BuiltLayer],
    data: Data,
    transport: Transport,
    run_dir: Path | None,
) -> Recorder:
    """The recorder of every rank; on rank 0 it has a screen, which shows the banner."""
    config, survey = run.config, run.survey
    live = sum(layer.state.live_bytes().total for layer in layers)
    peak = config.train.peak_flops
    own = [live, _matrix_peak(run.dtype) if peak == "auto" else peak]
    rows = sum_by_owner(transport.world, transport.backoff, own)
    sequences = config.batch.global_batch_size
    figures = RunFigures(
        steps=config.train.steps,
        log_every=config.train.log_every,
        tokens_per_step=sequences * (data.training.targets_per_sample or 1),
        flops_per_step=3 * survey.flops * sequences,  # backward is twice the forward
        peak_flops=sum(row[1] for row in rows),
        unit=data.unit,
    )
    if run_dir is None or transport.rank != 0:
        return Recorder(transport.world, transport.backoff, figures, None, None)
    console = make_console(sys.stdout)
    metrics = run_dir / METRICS_FILE
    lines = banner(
        config,
        survey,
        run.stages,
        run.place.grid,
        name=model_name,
        transport=transport.name,
        dense_bytes=max(
            run.state_bytes(run.layers_of(stage), {}) for stage in range(len(run.stages))
        ),
        live_bytes=int(max(row[0] for row in rows)),
        data=f"{data.name}: {format_count(data.training.num_samples)} samples",
        metrics=metrics,
    )
    for line in lines:
        console.line(line)
    return Recorder(transport.world, transport.backoff, figures, MetricsFile(metrics), console)


def _matrix_peak(dtype: torch.dtype) -> float:
    """Flop/s of a square matrix product in this rank, the best of a few."""
    size = 1024
    left = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(left, left)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
