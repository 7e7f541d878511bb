"""The parts that one rank trains with, and how each is given the other parts that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from axsparse.config.schema import num_microbatches
from axsparse.data_parallel.gradient_sync import GradientSync, WeightGather
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.models.losses import compiled
from axsparse.models.model_profile import ModelProfile
from axsparse.models.sequential import is_in_evaluation
from axsparse.observe.phases import DevicePhases, Phases
from axsparse.observe.recorder import Recorder
from axsparse.observe.watchdog.watchdog import Activity
from axsparse.pipeline.engine import Engine, Rank, decides_alone
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.policy import action
from axsparse.pipeline.stage import Stage
from axsparse.pipeline.weight_gradients import StageProducts
from axsparse.planner.auto_layout import configured_schedule
from axsparse.planner.stage_memory import is_recomputed
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.method_registry import choose_pruner
from axsparse.pruning.methods.pruner import Pruner
from axsparse.runtime.communication import Collective, Link, Transport
from axsparse.runtime.grid import RankCoords
from axsparse.samo.expansion import Expansion
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_construction import BuiltLayer, StateOptions
from axsparse.samo.layer_state import StageTie, Use
from axsparse.samo.offload import Offload
from axsparse.samo.shards import Replicas
from axsparse.samo.state_bytes import StateBytes
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.lockstep import Lockstep, MeetingLink
from axsparse.tensor_parallel.modules import Sharding, sharded_loss, sharded_products
from axsparse.training.placement import Placement
from axsparse.training.plan import RunPlan
from axsparse.training.run_data import Data
from axsparse.training.run_recorder import make_recorder


@dataclass(frozen=True)
class Parts:
    """The objects that a trainer works with on one rank; `assemble` puts them together."""

    plan: RunPlan
    placement: Placement
    data: Data
    layers: Sequence[BuiltLayer]
    engine: Engine
    link: Link
    tp_group: TensorGroup | None
    """The tensor-parallel ranks of this stage, where its layers are sharded."""
    collector: GradientCollector
    sync: GradientSync
    weights: WeightGather
    statistics: RunningStatistics
    replicas: Replicas
    """The replicas of this stage, by which they agree and exchange state."""
    offload: Offload | None
    """Brings masters and moments from the host for their update; None if they stay on the
    device."""
    expansion: Expansion | None
    """The memory in which weights that are sparse at rest are expanded; None if all are dense."""
    live: LiveMasks | None
    """The live masks of this rank's layers; None where nothing ever is pruned."""
    pruner: Pruner | None
    """Draws and changes masks between steps; None leaves them as they are."""
    phases: Phases
    activity: Activity
    """Shows the watchdog the current task of this rank."""
    recorder: Recorder
    run_dir: Path | None
    """The directory that the run writes to; None if it writes nothing."""

    @property
    def coords(self) -> RankCoords:
        """The stage and replica of this rank."""
        return self.plan.coords

    @property
    def profile(self) -> ModelProfile:
        """The contents of the layers of the full model."""
        return self.plan.profile

    @property
    def transport(self) -> Transport:
        """Reaches the other ranks."""
        return self.placement.transport

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        state = StateBytes.sum(layer.state.live_bytes() for layer in self.layers)
        return state + StateBytes(
            staged=0 if self.offload is None else self.offload.nbytes,
            expanded=0 if self.expansion is None else self.expansion.nbytes,
        )


def assemble(
    plan: RunPlan,
    layers: list[BuiltLayer],
    options: StateOptions,
    data: Data,
    placement: Placement,
    run_dir: Path | None,
) -> Parts:
    """The parts of this rank; `options` say how the state of its layers is stored.

    All ranks call this together, since they open their links.
    """
    coords, config, transport = plan.coords, plan.config, placement.transport
    recorder = make_recorder(plan, layers, data, placement, run_dir)
    phases = Phases() if placement.gpu is None else DevicePhases(placement.gpu)
    states, backoff = [layer.state for layer in layers], transport.backoff
    column = coords.grid.dp_group(coords.stage, coords.tp_rank)
    gradients = transport.collective(f"gradients of stage {coords.stage}", column)
    ties = _stage_ties(plan, layers, transport)
    sync = GradientSync(
        states, ties, replicas=gradients, wire_dtype=plan.dtype, backoff=backoff, phases=phases
    )
    collector = GradientCollector(states, sync.ready, phases.compression)
    group = options.sharding.group if isinstance(options.sharding, Sharding) else None
    products = _products(plan, layers, collector)
    link = _link(transport.link(coords), group, phases, products)
    engine = Engine(
        Rank(coords, backoff, phases, placement.gpu),
        _stage(plan, layers, products, group, options.expansion),
        link,
        schedule=configured_schedule(plan.config.pipeline),
        while_idle=sync.advance,
        around=decides_alone if group is None else partial(Lockstep, group, action),
    )
    live = _live_masks(plan, layers, options, transport)
    pruner = choose_pruner(config, plan.criterion, live, starts_pruned=plan.starts_pruned)
    gpu = placement.gpu if config.samo.offload else None
    return Parts(
        plan=plan,
        placement=placement,
        data=data,
        layers=layers,
        engine=engine,
        link=link,
        tp_group=group,
        collector=collector,
        sync=sync,
        weights=WeightGather(gradients, backoff, phases),
        statistics=_statistics(plan, layers, options),
        replicas=options.replicas,
        offload=None if gpu is None else Offload(gpu, states, backoff),
        expansion=options.expansion,
        live=live,
        pruner=pruner,
        phases=phases,
        activity=Activity(phases, backoff, engine.awaited),
        recorder=recorder,
        run_dir=run_dir,
    )


def _statistics(
    plan: RunPlan, layers: Sequence[BuiltLayer], options: StateOptions
) -> RunningStatistics:
    """The running statistics of this stage, which are common to its replicas where sums are
    exact."""
    is_exact = plan.config.samo.gradient == "exact"
    microbatches = num_microbatches(plan.config.batch) if is_exact else None
    modules = [layer.module for layer in layers]
    return RunningStatistics(modules, options.replicas, microbatches)


def _live_masks(
    plan: RunPlan, layers: list[BuiltLayer], options: StateOptions, transport: Transport
) -> LiveMasks | None:
    """The pruned tensors of these layers; None if nothing is ever pruned."""
    if plan.targets is None:
        return None
    pattern, ties = plan.criterion.pattern, plan.profile.ties
    return LiveMasks(layers, ties, plan.targets, pattern, options, plan.coords, transport)


def _link(
    link: Link, group: TensorGroup | None, phases: Phases, products: StageProducts | None
) -> Link:
    """The link of a rank; a tensor-parallel one sends and computes while it waits for others."""
    if group is None:
        return link
    group.idle, group.timed = link.push, partial(phases, "collective")
    if products is not None:
        group.beside = products.compute_deferred
    return MeetingLink(link, group) if group.on_gpus else link


def _stage(
    plan: RunPlan,
    layers: list[BuiltLayer],
    products: StageProducts | None,
    group: TensorGroup | None,
    expansion: Expansion | None,
) -> Stage:
    """The computation of this rank's layers; the loss belongs to the last stage."""
    coords, config, model = plan.coords, plan.config, plan.model
    pipeline = config.pipeline
    loss = model.loss
    if group is not None:
        loss = sharded_loss(model, group) or loss
    if pipeline.compile and coords.is_last:
        loss = compiled(loss)
    if is_in_evaluation(model):
        for layer in layers:
            layer.module.train()
    return Stage(
        [
            LayerRunner(
                layer.spec.name,
                layer.module,
                is_recomputed=is_recomputed(number, pipeline.checkpoint_activations),
                is_compiled=pipeline.compile is True,
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
    )


def _products(
    plan: RunPlan,
    layers: Sequence[BuiltLayer],
    collector: GradientCollector,
) -> StageProducts | None:
    """The products that take weight gradients out of backwards; None if autograd makes all of them,
    as in a compiled layer, whose backward is one function."""
    is_split = bool(plan.config.pipeline.split_backward)
    if plan.config.pipeline.compile is True:
        return None
    if plan.targets is not None and plan.config.samo.sparse_products is not False:
        collector.allow_sparse_products(plan.targets.shapes)
    modules = [(layer.spec.name, layer.module) for layer in layers]
    beside = set[nn.Module]().union(*(sharded_products(layer.module) for layer in layers))
    products = StageProducts(modules, collector, is_split=is_split, beside=beside)
    return products if is_split or len(products) else None


def _stage_ties(
    plan: RunPlan, layers: Sequence[BuiltLayer], transport: Transport
) -> list[StageTie]:
    """The ties with a use on this stage, in an order that all stages share."""
    coords = plan.coords
    tensors = {
        tensor.name: Use(layer.state, tensor) for layer in layers for tensor in layer.state.tensors
    }
    pairs: dict[tuple[int, int], Collective] = {}
    stage_ties = []
    for second, first in plan.profile.ties.items():
        uses = tuple(tensors[name] for name in (first, second) if name in tensors)
        if not uses:  # on other stages, or frozen
            continue
        stages = (plan.stage_of(first), plan.stage_of(second))
        if stages[0] != stages[1] and stages not in pairs:
            ranks = [coords.grid.rank(stage, coords.replica, coords.tp_rank) for stage in stages]
            pairs[stages] = transport.collective(f"tie {first}", ranks)
        stage_ties.append(StageTie(uses, pairs.get(stages)))
    return stage_ties
