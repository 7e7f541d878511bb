"""Decides which layout a run takes: how many stages and replicas, and which layers on each stage.

`chosen_layout` decides `layout.g_inter: auto` for a training, and `resolve_grid` makes the grid of
what was chosen or what the configuration gives. `balanced` decides `layout.split: auto`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.config.schema import Config, PipelineConfig, num_microbatches
from axsparse.config.section import counted, divisors, one_of
from axsparse.config.validate import check_split
from axsparse.models.model_profile import ModelProfile
from axsparse.pipeline.policy import Schedule
from axsparse.planner.cluster import DEFAULT_CLUSTER, Cluster, load_cluster
from axsparse.planner.layout_search import (
    DEFAULT_EXTRA_IN_FLIGHT,
    GATHERED,
    WAYS,
    Candidate,
    Layout,
    Rejection,
    SearchRequest,
    WeightWay,
    split_layers,
    try_layouts,
)
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import UNLIMITED, MemoryBudget, gigabytes
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

START = "start {}"
"""The words for another number of ranks, where a command is repeated with it."""


@dataclass(frozen=True)
class LayoutDecision:
    """The layout that `auto` takes, and why it takes this number of stages."""

    row: Candidate
    rank_budget: float
    smaller: Rejection | None
    """The layout of one number of stages less; None if there was none."""

    @property
    def reason(self) -> str:
        stages = counted(self.row.layout.grid.g_inter, "stage")
        memory = f"{gigabytes(self.row.most_bytes)} of {float(gigabytes(self.rank_budget)):g}"
        way = WAYS[self.row.weights]
        stored = f", with {way}" if way else ""
        text = f"{stages} (the fewest that fit: {memory} GB a rank{stored}"
        if self.smaller is not None:
            text += f"; with {self.smaller.g_inter}, {self.smaller.reason}"
        return text + ")"


# -- the number of stages ---------------------------------------------------------------


def chosen_layout(
    model: ProfiledModel, cluster: Cluster | None, ranks: int, budget: MemoryBudget
) -> LayoutDecision | None:
    """The fewest stages whose memory fits, for `layout.g_inter: auto`; ConfigError if none do.

    None, so that `resolve_grid` decides, if the configuration gives g_inter, g_data or a split, or
    if no number of stages leaves each replica a microbatch.
    """
    config, layout = model.config, model.config.layout
    g_tensor, all_ranks = layout.g_tensor, ranks
    if ranks % g_tensor:
        return None
    ranks //= g_tensor
    if not layout.g_inter == layout.g_data == layout.split == "auto":
        return None
    stages = [
        n
        for n in range(1, model.most_stages + 1)
        if ranks % n == 0 and num_microbatches(config.batch) >= ranks // n
    ]
    if not stages:
        return None
    # Without a named cluster memory alone decides, and no time is predicted.
    machine = machine_of(cluster, budget.overhead)
    found = fewest_stages(run_request(model, machine, all_ranks, stages, budget.nbytes))
    if isinstance(found, Rejection):
        is_given = layout.memory_per_rank != "auto"
        way = "raise layout.memory_per_rank" if is_given else "set layout.g_inter to try anyway"
        if budget.nbytes > budget.overhead:
            way = (
                "take more ranks, prune more, recompute activations "
                f"(pipeline.checkpoint_activations), or {way}"
            )
        raise ConfigError(
            f"{config.where('layout.g_inter')}: auto finds no number of stages of "
            f"{counted(ranks, 'rank')} that fits {format_bytes(budget.nbytes)} a rank, of which "
            f"the process itself takes {format_bytes(budget.overhead)}; with {found.g_inter}, "
            f"{found.reason}; {way}"
        )
    return found


def fitting_row(
    model: ProfiledModel, grid: Grid, budget: MemoryBudget, cluster: Cluster | None = None
) -> Candidate | None:
    """The row of a given layout in a limited memory, by which `pipeline.extra_in_flight: auto` and
    `samo.weights: auto` are decided; None if nothing fits."""
    machine = machine_of(cluster, budget.overhead)
    request = run_request(model, machine, grid.size, [grid.g_inter], budget.nbytes)
    rows, _ = try_layouts(request)
    return rows[0] if rows else None


def fewest_stages(request: SearchRequest) -> LayoutDecision | Rejection:
    """The fewest of the request's stages, which rise, that fit; the last rejection if none do."""
    assert request.g_inter, "there is nothing to try"
    smaller: Rejection | None = None
    for stages in request.g_inter:
        rows, rejected = try_layouts(replace(request, g_inter=[stages]))
        if rows:
            return LayoutDecision(rows[0], request.rank_budget, smaller)
        smaller = rejected[-1]
    assert smaller is not None
    return smaller


def resolve_grid(config: Config, ranks: int, num_layers: int, *, way: str = START) -> Grid:
    """The grid of `ranks` ranks for a model of `num_layers` layers, embedding and head included.

    ConfigError if the layout of the configuration does not use every rank, or cannot give each
    stage a layer and each layer a stage; `way` has the words for other ranks.
    """
    found = _grid(config, ranks, num_layers)
    if not isinstance(found, Grid):
        key, reason = found
        where = key if key == "layout" else config.where(key)
        raise ConfigError(f"{where}: {reason}; {_ways(config, key, ranks, num_layers, way)}")
    check_split(config, found.g_inter, num_layers)
    return found


def _grid(config: Config, ranks: int, num_layers: int) -> Grid | tuple[str, str]:
    """The grid; or the setting that leaves none, and why."""
    layout = config.layout
    g_inter, g_data, g_tensor = layout.g_inter, layout.g_data, layout.g_tensor
    layers, those = counted(num_layers, "layer"), counted(ranks, "rank")
    if g_inter != "auto" and g_inter > num_layers:
        return "layout.g_inter", f"{g_inter} stages for {layers}"
    if ranks % g_tensor:
        return "layout.g_tensor", f"{g_tensor} does not divide the {those}"
    groups = ranks // g_tensor
    if g_inter == g_data == "auto" and layout.split != "auto":
        g_inter, g_data = len(layout.split), groups // len(layout.split) or 1
    for key, count, other in (
        ("layout.g_inter", g_inter, g_data),
        ("layout.g_data", g_data, g_inter),
    ):
        if count != "auto" and other == "auto" and groups % count:
            of_groups = those if g_tensor == 1 else f"{groups} groups of {g_tensor} ranks"
            return key, f"{count} does not divide the {of_groups}"
    if g_inter == "auto":
        g_inter = 1 if g_data == "auto" else groups // g_data
    if g_data == "auto":
        g_data = groups // g_inter
    if g_inter > num_layers and layout.g_data != "auto":
        return "layout.g_data", f"{g_data} leaves {g_inter} stages for {layers}"
    if groups != g_inter * g_data:
        tensor = f" × g_tensor {g_tensor}" * (g_tensor > 1)
        return "layout", f"{those} ≠ g_inter {g_inter} × g_data {g_data}{tensor}"
    return Grid(g_inter, g_data, g_tensor)


def _ways(config: Config, key: str, ranks: int, num_layers: int, way: str) -> str:
    """The suggestion: another number of ranks, or other values of one setting or of several."""
    layout = config.layout

    def works(changed: dict[str, object], count: int = ranks) -> bool:
        new = config.with_values(changed)
        grid, split = _grid(new, count, num_layers), new.layout.split
        return (
            isinstance(grid, Grid)
            and grid.g_data <= num_microbatches(config.batch)
            and (split == "auto" or (len(split), sum(split)) == (grid.g_inter, num_layers))
        )

    given = [each for each in (layout.g_inter, layout.g_data) if each != "auto"]
    of_split = len(layout.split) if layout.split != "auto" and not given else 1
    each = math.prod(given) * of_split * layout.g_tensor
    verb = "choose"
    if key == "layout":
        key, verb = "layout.g_inter", "set layout.g_inter to"
    values, g_tensor = config.by_key(), layout.g_tensor
    near = of_split if values[key] == "auto" else values[key]
    # The divisors of g_tensor do for each model for which it does.
    most = math.gcd(ranks, g_tensor) if key == "layout.g_tensor" else ranks
    choices = [n for n in divisors(most) if works({key: n})]
    counts = [ranks + -ranks % each]
    if not choices:
        counts += [each, ranks - ranks % each]
    ways = []
    if (start := next((n for n in counts if n and works({}, n)), None)) is not None:
        before = f" (mpirun -n {start} before the same command)" * (ranks == 1 and way == START)
        ways.append(way.format(counted(start, "rank")) + before)
    if choices:
        return " or ".join([*ways, f"{verb} {one_of(choices, near=near)}"])
    free = {key: "auto" for key in ("layout.g_data", "layout.split") if values[key] != "auto"}
    also = f" and {' and '.join(free)} to auto" if free else ""
    if choices := [n for n in divisors(ranks) if works({**free, "layout.g_inter": n})]:
        ways.append(f"set layout.g_inter to {one_of(choices, near=near)}{also}")
    if not ways:
        stages = min(num_layers, ranks // g_tensor or 1)
        fewer = way.format(counted(stages * g_tensor, "rank"))
        ways.append(f"{fewer} and set layout.g_inter to {stages}{also}")
    return " or ".join(ways)


def cluster_of(config: Config) -> Cluster | None:
    """The cluster by whose constants times are predicted, if the configuration names one."""
    name = config.layout.cluster
    return None if name is None else load_cluster(name)


# -- the layers of each stage -----------------------------------------------------------


def balanced(config: Config, grid: Grid, model: ProfiledModel, budget: MemoryBudget) -> list[range]:
    """The layers of each stage for `layout.split: auto`: the busiest stage has as little work as
    can be while every stage fits the budget; ConfigError if none fits."""
    batch, schedule = config.batch, configured_schedule(config.pipeline)
    layout = Layout(grid, schedule, batch.microbatch_size, num_microbatches(batch, grid.g_data))
    found = split_layers(model, layout, budget.overhead, budget.nbytes)
    if not isinstance(found, Rejection):
        return [load.numbers for load in found]
    way = "raise layout.memory_per_rank"
    if budget.nbytes > budget.overhead:
        stages = "take more stages (layout.g_inter), " * (grid.g_inter < model.most_stages)
        way = (
            f"{stages}{way}, prune more, or recompute activations (pipeline.checkpoint_activations)"
        )
    raise ConfigError(
        f"{config.where('layout.memory_per_rank')}: no split of {model.most_stages} layers into "
        f"{grid.g_inter} stages fits {format_bytes(budget.nbytes)}, of which the process itself "
        f"takes {format_bytes(budget.overhead)}; with the work balanced, {found.reason}; {way}"
    )


def has_costs(profile: ModelProfile) -> bool:
    return all(layer.activations is not None for layer in profile.layers)


def configured_schedule(
    pipeline: PipelineConfig, *, extra_in_flight: int | None = None
) -> Schedule:
    """The schedule of a configuration; `extra_in_flight` replaces `auto`, and backwards whose
    splitting is left to `auto` are full."""
    extra_in_flight = (
        extra_in_flight if pipeline.extra_in_flight == "auto" else pipeline.extra_in_flight
    )
    assert extra_in_flight is not None, "an extra_in_flight that is auto has a stand-in"
    is_split = pipeline.split_backward is True
    return Schedule(pipeline.schedule, extra_in_flight, split_backward=is_split)


def run_request(
    model: ProfiledModel,
    cluster: Cluster,
    ranks: int,
    stages: Sequence[int] | None,
    rank_budget: float,
) -> SearchRequest:
    """The search request of a run: layouts of `ranks` ranks, at the batch, the microbatch size and
    the tensor-parallel ranks of the configuration, in `rank_budget` bytes a rank. `stages` are the
    numbers to try; None: all."""
    config, pipeline = model.config, model.config.pipeline
    others: dict[WeightWay, ProfiledModel] = {}
    if model.is_pruned and config.samo.weights == "auto":
        others["sparse"] = model.with_values({"samo.weights": "sparse"})
    if model.is_pruned and config.samo.zero_stage == "auto" and config.samo.weights != "dense":
        others["gathered"] = model.with_values(GATHERED)
    extra = pipeline.extra_in_flight
    tried = (DEFAULT_EXTRA_IN_FLIGHT, 0) if extra == "auto" else (extra,)
    return SearchRequest(
        model=model,
        others=others,
        cluster=cluster,
        gpus=ranks,
        global_batch_size=config.batch.global_batch_size,
        rank_budget=rank_budget,
        g_inter=stages,
        g_tensor=config.layout.g_tensor,
        microbatch_sizes=[config.batch.microbatch_size],
        schedules=[configured_schedule(pipeline, extra_in_flight=number) for number in tried],
    )


def machine_of(cluster: Cluster | None, overhead: float) -> Cluster:
    """The cluster, of processes of this overhead in bytes; None stands for one whose actions take
    as long as their flops say, at whatever rate, and whose messages take no time."""
    if cluster is not None:
        return replace(cluster, overhead_bytes=overhead)
    return replace(
        load_cluster(DEFAULT_CLUSTER),
        overhead_bytes=overhead,
        jitter=0.0,
        intra_node_latency=0.0,
        inter_node_latency=0.0,
        ring_latency=0.0,
        memory_bandwidth=math.inf,
        compression_rate=math.inf,
        intra_node_bandwidth=math.inf,
        inter_node_bandwidth=math.inf,
        nic_bandwidth=math.inf,
        host_bandwidth=math.inf,
        ring_bandwidth=math.inf,
    )


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of a run."""

    memory_bytes: float
    """Memory of the fullest rank until the first checkpoint, without its process's at the start."""
    step_seconds: float | None
    """Predicted seconds of a step; None without a cluster."""
    sum_bytes: int = 0
    """Bytes that a tensor-parallel rank sends to the others of its stage in a step, on the stage
    that sums most."""


def predict(model: ProfiledModel, grid: Grid, cluster: Cluster | None) -> Prediction:
    """Of a run whose layout and pipeline are decided, whatever memory there is."""
    row = fitting_row(model, grid, UNLIMITED, cluster)
    assert row is not None, "there is no limit"
    # The fullest stage while no checkpoint is being written.
    peak = max(stage.total - stage.checkpoint for stage in row.memory)
    return Prediction(peak, None if cluster is None else row.seconds, max(row.sum_bytes))
