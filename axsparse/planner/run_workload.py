"""The search request of a configured run, and the prediction for the layout of the run.

The layout of `layout.g_inter: auto` is decided in `auto_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.config.schema import Config, PipelineConfig
from axsparse.models.model_profile import ModelProfile
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import DEFAULT_CLUSTER, Cluster, load_cluster
from axsparse.planner.layout import DEFAULT_EXTRA_IN_FLIGHT, SearchRequest
from axsparse.planner.layout_search import try_layouts
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.runtime.grid import Grid


def has_costs(profile: ModelProfile) -> bool:
    """Whether the flops and activations of every layer are known."""
    return all(layer.activations is not None for layer in profile.layers)


def only_backward(pipeline: PipelineConfig) -> bool | None:
    """Whether backwards are split, True, or full, False, whatever the stages; None: split where
    there are several.

    Splitting is of use where arrivals decide, and where nothing fuses full backwards. Where
    activations are recomputed, deferred gradients would take many times the memory of the rest.
    """
    if pipeline.split_backward != "auto":
        return pipeline.split_backward
    is_free = pipeline.schedule == "message-driven" and pipeline.compile is not True
    return None if is_free and not pipeline.checkpoint_activations else False


def splits_backward(pipeline: PipelineConfig, g_inter: int) -> bool:
    """Whether the backwards of so many stages are split."""
    only = only_backward(pipeline)
    return g_inter > 1 if only is None else only


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
    return Schedule(pipeline.schedule, extra_in_flight, pipeline.prefer, split_backward=is_split)


def schedules(config: Config) -> list[Schedule]:
    """The schedules to try until one fits; the configuration says whether backwards are split."""
    pipeline = config.pipeline
    numbers = (
        (DEFAULT_EXTRA_IN_FLIGHT, 0)
        if pipeline.extra_in_flight == "auto"
        else (pipeline.extra_in_flight,)
    )
    return [
        configured_schedule(pipeline, extra_in_flight=extra_in_flight)
        for extra_in_flight in numbers
    ]


def run_request(
    planned_model: ProfiledModel,
    cluster: Cluster,
    config: Config,
    ranks: int,
    stages: Sequence[int] | None,
    rank_budget: float,
) -> SearchRequest:
    """The search request of a run: layouts of `ranks` ranks, at the batch, the microbatch size and
    the tensor-parallel ranks of the configuration, in `rank_budget` bytes a rank. `stages` are the
    numbers to try; None: all."""
    return SearchRequest(
        workload=planned_model,
        cluster=cluster,
        gpus=ranks,
        global_batch_size=config.batch.global_batch_size,
        memory_bytes=rank_budget,
        g_inter=stages,
        g_tensor=[config.layout.g_tensor],
        microbatch_sizes=[config.batch.microbatch_size],
        schedules=schedules(config),
        split_backward=only_backward(config.pipeline),
    )


def _of_grid(
    planned_model: ProfiledModel, cluster: Cluster | None, config: Config, grid: Grid
) -> SearchRequest:
    """A question that has this grid alone as its answer, in any memory."""
    search_request = run_request(
        planned_model, machine_of(cluster), config, grid.size, [grid.g_inter], math.inf
    )
    return replace(search_request, g_tensor=[grid.g_tensor])


def machine_of(cluster: Cluster | None) -> Cluster:
    """The cluster; None stands for one whose actions take as long as their flops say, at whatever
    rate, and whose messages take no time."""
    return cluster or replace(
        load_cluster(DEFAULT_CLUSTER),
        overhead_bytes=0.0,
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
    reason: str | None
    """Why there are this many stages; None if the configuration says so."""
    sum_bytes: int = 0
    """Bytes that a tensor-parallel rank sends to the others of its stage in a step, on the stage
    that sums most."""


def predict(
    planned_model: ProfiledModel,
    cluster: Cluster | None,
    config: Config,
    grid: Grid,
    extra_in_flight: int,
    reason: str | None,
) -> Prediction:
    """Predict a run whose layout is settled; `reason` is passed on."""
    schedule = configured_schedule(config.pipeline, extra_in_flight=extra_in_flight)
    search_request = _of_grid(planned_model, cluster, config, grid)
    [row], _ = try_layouts(replace(search_request, schedules=[schedule]))
    # The fullest stage while no checkpoint is being written.
    peak = max(stage.total - stage.checkpoint for stage in row.memory)
    seconds = None if cluster is None else row.seconds
    return Prediction(peak, seconds, reason, sum_bytes=max(row.sum_bytes))
