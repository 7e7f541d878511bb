"""The parts of a rank's stage: its ties, its products, its layers and loss, and its link."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from axsparse.config.schema import num_microbatches
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.models.losses import compiled
from axsparse.models.sequential import is_in_evaluation
from axsparse.observe.phases import Phases
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.stage import Stage
from axsparse.pipeline.weight_gradients import StageProducts
from axsparse.planner.stage_memory import is_recomputed
from axsparse.runtime.communication import Collective, Link, Transport
from axsparse.samo.expansion import Expansion
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.layer_state import StageTie, Use
from axsparse.samo.shards import Replicas
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.lockstep import MeetingLink
from axsparse.tensor_parallel.modules import sharded_loss, sharded_products
from axsparse.training.plan import RunPlan


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
    modules = [(layer.spec.name, layer.module) for layer in layers]
    beside = set[nn.Module]().union(*(sharded_products(layer.module) for layer in layers))
    products = StageProducts(modules, collector, is_split=is_split, beside=beside)
    return products if is_split or len(products) else None


def stage_of_layers(
    plan: RunPlan,
    layers: Sequence[BuiltLayer],
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


def stage_link(
    link: Link, group: TensorGroup | None, phases: Phases, products: StageProducts | None
) -> Link:
    """The link of a rank; a tensor-parallel one sends and computes while it waits for others."""
    if group is None:
        return link
    group.idle, group.timed = link.push, partial(phases, "collective")
    if products is not None:
        group.beside = products.compute_deferred
    return MeetingLink(link, group) if group.on_gpus else link


def stage_statistics(
    plan: RunPlan, layers: Sequence[BuiltLayer], replicas: Replicas
) -> RunningStatistics:
    """The running statistics, which are common to the replicas where sums are exact."""
    is_exact = plan.config.samo.gradient == "exact"
    microbatches = num_microbatches(plan.config.batch) if is_exact else None
    return RunningStatistics([layer.module for layer in layers], replicas, microbatches)
