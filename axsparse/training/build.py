"""The steps of a rank before it trains: settings, devices, plan, directory, state, and what
computes the layers of its stage."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from axsparse.config.schema import Config
from axsparse.config.section import flat
from axsparse.config.validate import check_config, check_offload, reject_quiet
from axsparse.data.batches import Batch
from axsparse.data.dataset import Datasets
from axsparse.models.layer import Layer, Model
from axsparse.models.layer_cost import CostError
from axsparse.models.losses import SUMS, compiled, linear_cross_entropy
from axsparse.models.model_profile import ModelProfile, costs_of, profile, with_costs
from axsparse.models.module_buffers import start_training, switch_mode
from axsparse.models.sequential import frozen_in_training, is_in_evaluation
from axsparse.observe.metrics import reject_missing_packages
from axsparse.observe.out_of_memory import with_advice, with_host_advice
from axsparse.observe.phases import Phases
from axsparse.observe.watchdog.watchdog import watched
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.stage import Stage, StageTeacher
from axsparse.pipeline.weight_gradients import StageProducts
from axsparse.planner.stage_memory import UNLIMITED, is_recomputed
from axsparse.pruning.calibration import Calibration
from axsparse.pruning.healing import HealedLayers, Reconstruction
from axsparse.pruning.input_statistics import METHODS
from axsparse.pruning.layer_pruning import CalibratedMasks, LayerPruning
from axsparse.pruning.methods.live_masks import masks_of_start, masks_of_zeros, stage_total
from axsparse.pruning.methods.pruner import Pruner
from axsparse.pruning.outliers import sparsities
from axsparse.runtime.communication import Collective, Link, Transport
from axsparse.runtime.console import Console, make_console
from axsparse.runtime.errors import ConfigError, check_kind
from axsparse.runtime.exchange import gather_values, together, value_of_first
from axsparse.runtime.job import Job
from axsparse.runtime.machine import give_back_at_once, keep_freed_blocks
from axsparse.runtime.process import BLOCKS, are_scattered, installed_mpi
from axsparse.samo.expansion import Expansion, LayerGather
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.host.compiled_loops import FEW, can_compile
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers, start_values
from axsparse.samo.layer_state import StageTie, Use
from axsparse.samo.masks import Masks
from axsparse.samo.optim.optimizer import Optimizer, own_learning_rate
from axsparse.samo.precision import DTYPES
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import StateBytes
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.lockstep import MeetingLink
from axsparse.tensor_parallel.modules import Sharding, sharded_loss, sharded_products
from axsparse.training.checkpoint.layer_files import CheckpointFiles, load_layers, thawed_and_frozen
from axsparse.training.checkpoint.verification import (
    MEANS,
    START,
    Checkpoint,
    reject_other_model,
    reject_other_settings,
    reject_other_teacher,
)
from axsparse.training.placement import Placement, bind_rank
from axsparse.training.plan import (
    RunPlan,
    decided_precision,
    found_budget,
    plan_run,
    reject_mismatching_rank,
)
from axsparse.training.run_directory import HEALED, RunDir, open_run_dir
from axsparse.training.run_sources import Data, RunSources, open_data

OF_HEALING = ("pruning.", "data.", "model.", "seed", "precision", "batch.microbatch_size")
"""Beginnings of settings that determine the result of pruning at once and healing."""
SAMPLED = 16
"""The microbatches of calibration samples by which outliers are counted: shares of entries, which
more samples hardly change."""


@dataclass(frozen=True)
class PrunedLayers:
    """The results of `prune_layers`."""

    plan: RunPlan
    healed: HealedLayers
    """A file for each layer of which something is pruned."""
    pruned: Sequence[str]
    before: float
    """The mean loss of a validation target of the model as it was; NaN without validation data."""
    after: float
    """The same mean loss of the pruned model."""
    held_out: int
    """The validation samples that these are of."""


@torch.inference_mode(mode=False)
def owl_sparsities(
    job: Job,
    model: Model,
    open_datasets: Callable[[], Datasets],
    config: Config,
    mean: float,
    folder: Path,
) -> dict[str, float]:
    """The sparsity of each tensor to prune, by the outliers of its layer among the first samples of
    calibration (`outliers`); all ranks call this together. A run that hangs leaves its report in
    `folder`. Raises what `prune_layers` raises."""
    plan, _, calibration, _ = _prepared_calibration(job, model, open_datasets, config)
    few = replace(calibration, samples=calibration.samples[:SAMPLED])
    with _watched_calibration(plan, few, folder, job.reworded) as few:
        shares = few.outlier_shares()
    known = gather_values(calibration.transport, shares)
    share_of = {name: share for own in known for name, share in own.items()}
    assert plan.targets is not None, "something is pruned"
    shapes = plan.targets.shapes
    layers = {
        layer.name: [it.name for it in layer.parameters if it.name in shapes]
        for layer in plan.profile.layers
    }
    entries = {name: sum(math.prod(shapes[tensor]) for tensor in layers[name]) for name in share_of}
    found = sparsities(share_of, entries, mean)
    return {tensor: found[name] for name in found for tensor in layers[name]}


@torch.inference_mode(mode=False)
def prune_layers(
    job: Job,
    model: Model,
    open_datasets: Callable[[], Datasets],
    config: Config,
    folder: Path,
    announce: Callable[[RunPlan, float | None], None] = lambda _plan, _seconds: None,
) -> PrunedLayers:
    """Prune a model at once, and heal it if `pruning.heal` says so, one layer at a time.

    All ranks call this together. Every stage has one of its layers at a time and the activations
    of the samples, and what is made of the layer goes into a file in `folder`, where a killed start
    finds it. Before, all ranks call `announce` with the plan and the seconds of a forward and a
    backward of one microbatch through a pruned layer, None if the first stage has none. The losses
    are of the first `train.eval_steps` batches of validation samples, which pass through the layers
    by the side. TrainingError where healing diverges.
    """
    plan, data, calibration, count = _prepared_calibration(job, model, open_datasets, config)
    transport = calibration.transport
    healed = _healed_layers(plan, data, folder)
    console = make_console(sys.stdout)
    is_shown = plan.coords.replica == 0
    calibration = replace(
        calibration,
        says=console.line if is_shown else lambda _: None,
        shows=console.progress if is_shown else lambda *_: None,
        healed=healed,
        forgets=True,
    )
    announce(plan, value_of_first(transport, calibration.seconds_of_layer()))
    losses = _calibrated(plan, calibration, folder.parent, job.reworded).losses
    console.close()
    before, after = next(filter(None, gather_values(transport, losses)))
    return PrunedLayers(plan, healed, calibration.pruned, before, after, count)


def _prepared_calibration(
    job: Job, model: Model, open_datasets: Callable[[], Datasets], config: Config
) -> tuple[RunPlan, Data, Calibration, int]:
    """The plan of a model that is pruned one layer at a time, its data, the calibration of this
    rank, and the number of validation samples of which it gives the losses."""
    plan, placement = _planned(job, model, config, is_limited=False)
    transport = placement.transport
    prepare_process(job, plan, transport)
    if plan.on_host:
        keep_freed_blocks()  # A layer reuses the memory of the one before: 16 % of healing's time.
    data = open_data(plan, config, transport, open_datasets)
    count, held_out = 0, Batch(0, (), 0)
    if data.validation is not None:
        batches, count = plan.config.train.eval_steps, data.validation.num_samples
        if batches != "all":
            count = min(count, batches * plan.config.batch.global_batch_size)
        held_out = data.validation.alone(count).evaluation(0)
    options = _state_options(plan, placement)
    own = [model.layers[number] for number in plan.stages[plan.coords.stage]]
    return plan, data, _calibration(plan, own, options, transport, data, held_out), count


def check_fits(job: Job, model: Model, config: Config) -> None:
    """Raise on all ranks alike what a training of this model on these ranks would raise before it
    builds anything, such as ConfigError where no number of stages fits the memory."""
    _planned(job, model, config, is_limited=True)


def _planned(
    job: Job, model: Model, config: Config, *, is_limited: bool
) -> tuple[RunPlan, Placement]:
    """The plan of a run, in the memory of a rank or in any, and the place of this rank."""
    check_settings(job, config, model)
    placement, config = placed(job, config)
    transport, on_host = placement.transport, placement.gpu is None
    profiled = profile_together(model, config, transport)
    budget = found_budget(config, transport, placement.memory) if is_limited else UNLIMITED
    plan = together(
        transport,
        lambda: plan_run(config, model, profiled, transport, on_host=on_host, budget=budget),
    )
    return plan, placement


# -- settings -----------------------------------------------------------------------------


def check_settings(job: Job, config: Config, model: Model) -> Config:
    """Check the configuration; returns it, under the name of the model unless it has one."""
    config = config.named(model.name)
    together(job.transport, lambda: check_config(config))
    together(job.transport, lambda: reject_missing_packages(config))
    return config


def reject_arguments(given: RunSources) -> None:
    """ConfigError for rules of wrong types, which would otherwise be found deep within, and for
    arguments of a trainer that exclude each other."""
    way = "give an ax.Optimizer, or leave it out and set optimizer.name"
    check_kind("Trainer: optimizer", given.optimizer, Optimizer | None, way)
    way = "give a number, or a function of the number of a step"
    check_kind("Trainer: learning_rate", given.learning_rate, Callable | None, way)
    if given.learning_rate is not None:
        own_learning_rate(given.learning_rate, 0)
    ways = {"quiet": given.quiet, "resume": given.resume is not None, "overwrite": given.overwrite}
    asked = [name for name, is_given in ways.items() if is_given]
    if len(asked) > 1:
        raise ConfigError(f"Trainer: {' and '.join(asked)} exclude each other; give one of them")
    if given.overwrite and given.config.run_dir == "auto":
        raise ConfigError(
            "Trainer: overwrite begins the run of run_dir anew, and run_dir is auto, a directory "
            "that no run has; name it, as in run_dir='runs/first'"
        )
    if given.quiet:
        reject_quiet(given.config)


# -- this process among the others --------------------------------------------------------


def placed(job: Job, config: Config) -> tuple[Placement, Config]:
    """This rank's device, with a new transport that only the coming trainer uses, and the
    configuration with a precision for all devices."""
    placement = job.placement
    if not isinstance(placement, Placement):
        job.placement = placement = bind_rank(job.transport, config)
    transport = job.branch()
    has_gpu = placement.gpu is not None
    together(transport, lambda: check_offload(config, has_gpu=has_gpu))
    config, lines = decided_precision(config, transport, on_host=not has_gpu)
    return replace(placement, transport=transport, table=(*placement.table, *lines)), config


def profile_together(
    model: Model, config: Config, transport: Transport, device: torch.device | None = None
) -> ModelProfile:
    """The profile on every rank.

    Only rank 0 runs the layers to find what they cost, which costs about one second per process. On
    a `device` layers run if they do not on the meta device: the example is then a microbatch of the
    data.
    """
    dtype, runs = DTYPES[config.precision], transport.rank == 0

    def profiled_here() -> ModelProfile:
        if not runs:
            return profile(replace(model, example=None), dtype)
        if device is None:
            return profile(model, dtype)
        size = config.batch.microbatch_size
        try:
            return profile(model, dtype, samples=size)
        except CostError:
            return profile(model, dtype, samples=size, device=device)

    profiled = together(transport, profiled_here)
    names = ", ".join(layer.name for layer in profiled.layers)
    together(transport, lambda: reject_mismatching_rank(transport, {"layers": names}))
    return with_costs(profiled, value_of_first(transport, costs_of(profiled)))


def prepare_process(job: Job, plan: RunPlan, transport: Transport) -> None:
    """Check that all ranks run the same code and settings, and set up this process."""
    job.where = str(plan.coords)
    together(transport, lambda: reject_mismatching_rank(transport, plan.facts))
    torch.set_num_threads(plan.config.train.threads)
    if plan.on_host:
        # Memory that a build takes for a while would leave holes between the blocks that stay.
        give_back_at_once()
        layers = plan.layers_of(plan.coords.stage)
        if any(size.numel > FEW for layer in layers for size in layer.parameters):
            can_compile()  # This loads LLVM, before the memory outside the state is measured.


def launch_warnings(plan: RunPlan, transport: Transport) -> list[str]:
    """Warnings of stages scattered over hosts, and of a second MPI library."""
    warnings, mpi = [], installed_mpi()
    if len(mpi) > 1:
        warnings.append(
            f"warning: this environment has {' and '.join(mpi)}; pip uninstall all but one"
        )
    hosts = gather_values(transport, socket.gethostname())
    if plan.coords.grid.parallelism > 1 and are_scattered(hosts):
        warnings.append(f"warning: neighbouring stages are on different hosts; start with {BLOCKS}")
    return warnings


# -- the run directory --------------------------------------------------------------------


def reject_other_run(
    checkpoint: Checkpoint, plan: RunPlan, config: Config, *, is_first: bool
) -> list[str]:
    """Lines for the user about settings and parameters that have changed since the checkpoint, for
    the first rank all of them. Raises the errors of a checkpoint that does not fit, other than of
    its data."""
    lines = reject_other_settings(checkpoint, plan.config, config)
    reject_other_model(checkpoint, plan.profile)
    reject_other_teacher(checkpoint, plan.taught_from)
    return lines + (thawed_and_frozen(checkpoint, plan.profile) if is_first else [])


def open_run_directory(
    job: Job, plan: RunPlan, config: Config, resumed: RunDir, locks: ExitStack, *, overwrite: bool
) -> RunDir:
    """Open the run directory, write the initial records and print the notes; from now on signals
    save. Where the run overwrites another one, `RunDir.begin` is left to the trainer."""
    transport = job.transport
    opened = open_run_dir(config, transport, resumed, locks, overwrite=overwrite)
    begins = transport.rank == 0 and not overwrite
    together(transport, lambda: opened.begin(plan.config) if begins else None)
    if transport.rank == 0:
        for line in resumed.notes:
            Console(sys.stdout, bar=False).line(f"axsparse: {line}")  # no recorder is there yet
    job.run_dir, job.shown_run_dir = opened.folder, opened.path
    job.stop.listen()
    return opened


# -- the state of this rank's stage -------------------------------------------------------


def build_state(
    plan: RunPlan,
    placement: Placement,
    data: Data,
    checkpoint: Checkpoint | None,
    run_dir: Path | None,
) -> tuple[list[BuiltLayer], list[BuiltLayer], StateOptions]:
    """The layers of this rank's stage, compressed if the run has masks from the start, the
    teacher's layers next to them, and how state is stored.

    TrainingError on all ranks where a GPU has no memory for them.
    """
    coords, transport = plan.coords, placement.transport
    on_gpus = placement.gpu is not None
    group = TensorGroup(coords, transport, on_gpus=on_gpus) if coords.grid.g_tensor > 1 else None
    sharding = None if group is None else Sharding(group)
    options = replace(_state_options(plan, placement), sharding=sharding)
    stage_layers = [plan.model.layers[number] for number in plan.stages[coords.stage]]
    masks: Masks | None
    if checkpoint is None:
        masks = _first_masks(plan, stage_layers, options, transport, data, run_dir)
    else:
        masks = CheckpointFiles(checkpoint)
    # SparseGPT and healing change weights as well.
    start = masks if isinstance(masks, CalibratedMasks) and masks.changes_weights else options.start
    planned = None if plan.prediction is None else plan.prediction.memory_bytes

    def construct() -> tuple[list[BuiltLayer], list[BuiltLayer]]:
        where = f"building {coords}"
        with with_advice(lambda: where, StateBytes, planned):
            built = build_layers(
                stage_layers, plan.profile.ties, replace(options, masks=masks, start=start)
            )
            return built, _teacher_layers(plan, options)

    return *together(transport, construct), options


def _teacher_layers(plan: RunPlan, options: StateOptions) -> list[BuiltLayer]:
    """The teacher's layers of this rank's stage, if there is a teacher: dense weights alone."""
    teacher, profiled = plan.model.teacher, plan.profile.teacher
    if teacher is None or profiled is None:
        return []
    layers = teacher.layers(plan.profile.taught(plan.stages[plan.coords.stage]))
    own = replace(options, start=teacher.model.start, replicas=ALONE, expansion=None)
    return build_layers(layers, profiled.ties, own)


def _state_options(plan: RunPlan, placement: Placement) -> StateOptions:
    """How the state of every layer is stored, before there are masks."""
    backend, coords, transport = placement.backend, plan.coords, placement.transport
    column = coords.grid.dp_group(coords.stage, coords.tp_rank)
    agreeing = transport.collective(f"agreements of stage {coords.stage}", column)
    gather = expansion = None
    if plan.gathers_weights:
        group = transport.collective(f"weights of stage {coords.stage}", column)
        gather = LayerGather(group, transport.backoff)
    if plan.config.samo.offload:
        assert placement.gpu is not None, "the settings were checked"
        backend = replace(backend, host=placement.gpu.pinned)
    if plan.has_sparse_weights:
        expansion = Expansion(plan.dtype, backend.device, gather)
    return StateOptions(
        stored=plan.state_format,
        seed=plan.config.seed,
        masks=None,
        replicas=Replicas(agreeing, transport.backoff, bool(plan.config.samo.zero_stage)),
        start=plan.model.start,
        backend=backend,
        expansion=expansion,
    )


def _first_masks(
    plan: RunPlan,
    own: Sequence[Layer],
    options: StateOptions,
    transport: Transport,
    data: Data,
    run_dir: Path | None,
) -> Masks | None:
    """The masks that state is built with; None where it starts dense. Ranks communicate while they
    draw, so that one that fails there ends the job."""
    if plan.targets is None or not plan.starts_pruned:
        return None
    if plan.targets.mask_file is not None:
        return plan.targets.mask_file
    ties, pruning = plan.profile.ties, plan.config.pruning
    heals = pruning.heal != "none"
    is_shown = run_dir is not None and plan.coords.replica == 0 == plan.coords.tp_rank
    if pruning.method in METHODS or plan.criterion.sees_inputs or heals:
        size = min(pruning.calibration_samples, plan.config.batch.microbatch_size)
        held_out = data.training.alone(size).training(0)
        calibration = _calibration(plan, own, options, transport, data, held_out)
        healed = None
        if heals and run_dir and pruning.method != "custom":  # a score has no fingerprint
            healed = _healed_layers(plan, data, run_dir / HEALED)
        says: Callable[[str], None] = partial(print, flush=True) if is_shown else lambda _: None
        if pruning.calibration_samples > data.training.num_samples:
            says(
                f"warning: pruning.calibration_samples: {pruning.calibration_samples} are more "
                f"than the {data.training.num_samples} samples of the data; some count repeatedly"
            )
        drawn = _calibrated(plan, replace(calibration, says=says, healed=healed), run_dir)
        for before, after in [drawn.losses] if drawn.losses else []:
            says(
                f"{pruning.method}: loss of the first microbatch {before:.4f} before, "
                f"{after:.4f} after"
            )
        return drawn
    values = (
        value
        for layer in own
        for value in start_values(layer, ties, options).items()
        if value[0] not in ties
    )
    total = partial(stage_total, plan.coords, transport)
    if pruning.method == "zeros" or pruning.initial_sparsity:
        return masks_of_zeros(plan.targets, pruning, values, total)
    return masks_of_start(plan.targets, plan.criterion, values, total)


# Reason: all of them are parts of a calibration.
def _calibration(
    plan: RunPlan,
    own: Sequence[Layer],
    options: StateOptions,
    transport: Transport,
    data: Data,
    held_out: Batch,
) -> Calibration:
    """The calibration of a run, of which the losses of some samples are known afterwards."""
    pruning = plan.config.pruning
    assert plan.targets is not None, "a run that prunes nothing draws no masks"
    fit = Reconstruction(
        pruning.heal_passes, pruning.heal_rate, pruning.heal_batch, options.replicas
    )
    samples, heals = data.training.first(pruning.calibration_samples), pruning.heal != "none"
    shapes, layers = plan.targets.shapes, plan.model.layers
    pruned = [
        layer.name
        for layer in plan.profile.layers
        if any(parameter.name in shapes for parameter in layer.parameters)
    ]
    last = [layer.name for layer in layers].index(pruned[-1])
    apart = [
        parameter.name
        for layer in plan.profile.layers
        for parameter in layer.parameters
        if plan.model.loss is linear_cross_entropy
        and (layer.kind == "head" or (layer.kind == "embedding" and not parameter.multiplies))
    ]
    return Calibration(
        LayerPruning(pruning.method, plan.targets, plan.criterion, plan.profile.ties, apart),
        own,
        pruned,
        options,
        plan.coords,
        transport,
        lambda targets, outputs: plan.model.loss(*outputs, targets.to(outputs[0].device)),
        samples,
        held_out,
        fit=fit if heals else None,
        num_targets=tuple(sample.num_targets for sample in samples) if heals else (),
        behind=layers[last + 1 :],
    )


def _calibrated(
    plan: RunPlan,
    calibration: Calibration,
    folder: Path | None,
    reworded: Callable[[str], str] = str,
) -> CalibratedMasks:
    """The masks that a calibration draws; ConfigError on all ranks if it does not fit the model."""
    together(calibration.transport, calibration.check)
    with _watched_calibration(plan, calibration, folder, reworded) as calibration:
        return calibration.draw()


@contextmanager
def _watched_calibration(
    plan: RunPlan, calibration: Calibration, folder: Path | None, reworded: Callable[[str], str]
) -> Iterator[Calibration]:
    """The calibration under a watchdog, whose report is in the folder."""
    way = "start more ranks, each of which has some of the layers, or take a larger machine"
    with (
        watched(
            *("calibration", plan.config.watchdog, folder),
            coords=calibration.coords,
            transport=calibration.transport,
            reworded=reworded,
        ) as beats,
        with_host_advice(lambda: f"the calibration of {plan.coords}", way),
    ):
        yield replace(calibration, beats=beats)


def _healed_layers(plan: RunPlan, data: Data, folder: Path) -> HealedLayers:
    """The folder of healed layers; the settings that decide them are in their fingerprint."""
    settings, start = flat(plan.config.model_dump(mode="json")), plan.model.start
    decides = {
        key: value
        for key, value in settings.items()
        if key.startswith(OF_HEALING) and not key.startswith((*MEANS, *START, "data.validation"))
    }
    of = (json.dumps(decides), "" if start is None else start.fingerprint, data.entry.fingerprint)
    fingerprint = hashlib.sha256("\n".join(of).encode()).hexdigest()
    is_first = plan.coords.replica == 0 == plan.coords.tp_rank
    return HealedLayers(folder, fingerprint, writes=is_first)


def load_state(
    checkpoint: Checkpoint, plan: RunPlan, layers: Sequence[BuiltLayer], pruner: Pruner | None
) -> None:
    """Read the state of this rank, and how far its pruning method was."""
    load_layers(checkpoint, layers, plan.profile.ties)
    if pruner is not None:
        pruner.restore(checkpoint.manifest.method_state, CheckpointFiles(checkpoint).read_pruner)


# -- what computes the layers of the stage --------------------------------------------------


def stage_ties(plan: RunPlan, layers: Sequence[BuiltLayer], transport: Transport) -> list[StageTie]:
    """The ties with a use on this stage, in an order that all stages share."""
    coords = plan.coords
    tensors = {
        tensor.name: Use(layer.state, tensor) for layer in layers for tensor in layer.state.tensors
    }
    pairs: dict[tuple[int, int], Collective] = {}
    ties = []
    for second, first in plan.profile.ties.items():
        uses = tuple(tensors[name] for name in (first, second) if name in tensors)
        if not uses:  # on other stages, or frozen
            continue
        stages = (plan.stage_of(first), plan.stage_of(second))
        if stages[0] != stages[1] and stages not in pairs:
            ranks = [coords.grid.rank(stage, coords.replica, coords.tp_rank) for stage in stages]
            pairs[stages] = transport.collective(f"tie {first}", ranks)
        ties.append(StageTie(uses, pairs.get(stages)))
    return ties


def stage_products(
    plan: RunPlan, layers: Sequence[BuiltLayer], collector: GradientCollector
) -> StageProducts | None:
    """The products that take weight gradients out of backwards; None if autograd makes all of them,
    as in a compiled layer, whose backward is one function."""
    is_split = bool(plan.config.pipeline.split_backward)
    if plan.config.pipeline.compile is True:
        return None
    if plan.targets is not None and plan.config.samo.sparse_products is not False:
        collector.allow_sparse_products(plan.targets.shapes)
    modules = [layer.module for layer in layers]
    deferring = set[nn.Module]().union(*(sharded_products(layer.module) for layer in layers))
    products = StageProducts(modules, collector, is_split=is_split, deferring=deferring)
    return products if is_split or len(products) else None


def stage_of_layers(
    plan: RunPlan,
    layers: Sequence[BuiltLayer],
    products: StageProducts | None,
    group: TensorGroup | None,
    expansion: Expansion | None,
    taught: Sequence[BuiltLayer] = (),
) -> Stage:
    """The computation of this rank's layers, and of the `taught` ones of a teacher; the loss
    belongs to the last stage."""
    coords, config, model = plan.coords, plan.config, plan.model
    pipeline = config.pipeline
    loss = model.loss
    if group is not None:
        loss = sharded_loss(model, group) or loss
    if pipeline.compile and coords.is_last:
        loss = compiled(loss)
    trains_all, container = is_in_evaluation(model), model.container
    frozen = frozen_in_training(container) if trains_all and container is not None else set()
    for layer in layers:
        start_training(layer.module)
        if trains_all:
            with layer.state.expanded():
                switch_mode(layer.spec.name, layer.module, training=True)
            for path, child in layer.module.named_modules():
                child.training &= layer.spec.full_name(path).rstrip(".") not in frozen
    teacher = None
    if model.teacher is not None:
        runners = [
            LayerRunner(f"{layer.spec.name} of the teacher", layer.module, is_recomputed=False)
            for layer in taught
        ]
        teacher = StageTeacher(runners, model.teacher.distilled)
    return Stage(
        [
            LayerRunner(
                layer.spec.name,
                layer.module,
                is_recomputed=is_recomputed(number, pipeline.checkpoint_activations),
                is_compiled=pipeline.compile is True and getattr(layer.module, "can_compile", True),
                state=None if expansion is None else layer.state,
            )
            for number, layer in enumerate(layers)
        ],
        loss=loss if coords.is_last else None,
        metrics=model.metrics if coords.is_last else {},
        input_dtype=plan.dtype if coords.is_first else None,
        seed=config.seed,
        products=products,
        expansion=expansion,
        teacher=teacher,
        loss_is_known=model.loss in SUMS,
    )


def stage_link(
    link: Link, group: TensorGroup | None, phases: Phases, products: StageProducts | None
) -> Link:
    """The link of a rank; a tensor-parallel one sends and computes while it waits for others."""
    if group is None:
        return link
    group.idle, group.timed = link.push, partial(phases, "collective")
    if products is not None:
        group.while_summing = products.compute_deferred
    return MeetingLink(link, group) if group.on_gpus else link
