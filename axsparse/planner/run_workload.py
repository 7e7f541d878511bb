"""What a configured run asks the planner, and what it predicts for the layout of the run.

Which layout `layout.g_inter: auto` takes is decided in `auto_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.config.schema import Config, PipelineConfig
from axsparse.models.survey import Survey
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import DEFAULT_CLUSTER, Cluster, load_cluster
from axsparse.planner.layout import DEFAULT_SLACK, LayoutQuestion
from axsparse.planner.layout_search import try_layouts
from axsparse.planner.schedule_choice import Trade, may_split, split_row, trade
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.runtime.grid import Grid

WORTH_SPLITTING = 2e8
"""Flops of a matrix's product in one microbatch's forward from which on `pipeline.split_backward:
auto` splits. To take a weight's gradient out of a backward costs some 0.2 ms on a busy CPU; the
three products of so many flops take 2 ms there (docs/decisions/036)."""
GPU_WORTH_SPLITTING = 2e10
"""The same on GPUs, where it costs launches. Not measured."""


def has_costs(survey: Survey) -> bool:
    """Whether the flops and activations of every layer are known."""
    return all(layer.activations is not None for layer in survey.layers)


def only_backward(pipeline: PipelineConfig) -> bool | None:
    """Whether backwards have to be split, True, or whole, False; None if either will do.

    Split ones are of use where what arrives decides, and where nothing fuses whole ones.
    """
    if pipeline.split_backward != "auto":
        return pipeline.split_backward
    return None if pipeline.schedule == "message-driven" and not pipeline.compile else False


def least_split_samples(survey: Survey, *, on_host: bool) -> float:
    """The smallest microbatch whose weight gradients are worth taking out of backwards, of layers
    that are whole; a part of a sample if one is more than enough."""
    matrices = sum(
        len(parameter.shape) > 1 and parameter.trained
        for layer in survey.layers
        for parameter in layer.parameters
    )
    least = WORTH_SPLITTING if on_host else GPU_WORTH_SPLITTING
    return least * matrices / max(survey.flops, 1.0)


def configured_schedule(
    pipeline: PipelineConfig, *, slack: int | None = None, is_split: bool | None = None
) -> Schedule:
    """The schedule of a configuration; `slack` and `is_split` stand in for its own `auto`."""
    slack = slack if pipeline.slack == "auto" else pipeline.slack
    is_split = is_split if pipeline.split_backward == "auto" else pipeline.split_backward
    assert slack is not None and is_split is not None, "settings that are auto have stand-ins"
    return Schedule(
        pipeline.schedule,
        slack,
        pipeline.prefer,
        split_backward=is_split,
        held=None if pipeline.held == "auto" else pipeline.held,
    )


def schedules(config: Config, *, has_times: bool) -> list[Schedule] | None:
    """The schedules to try until one fits; None: message-driven with what pays.

    That needs predicted times, so without them (`has_times`) two fixed slacks are tried, with whole
    backwards where the configuration leaves these open: `split_trade` then says whether to split.
    """
    pipeline = config.pipeline
    is_free = (pipeline.slack, pipeline.held, pipeline.prefer) == ("auto", "auto", "alternate")
    if has_times and pipeline.schedule == "message-driven" and is_free:
        return None
    slacks = (DEFAULT_SLACK, 0) if pipeline.slack == "auto" else (pipeline.slack,)
    is_split = only_backward(pipeline) is True
    return [configured_schedule(pipeline, slack=slack, is_split=is_split) for slack in slacks]


def run_question(
    subject: SurveyedModel,
    cluster: Cluster,
    config: Config,
    ranks: int,
    stages: Sequence[int] | None,
    room: float,
) -> LayoutQuestion:
    """What a run asks the planner: layouts of `ranks` ranks, at the batch, the microbatch size and
    the members of the configuration, in `room` bytes a rank. `stages` are the numbers to try; None:
    all."""
    return LayoutQuestion(
        workload=subject,
        cluster=cluster,
        gpus=ranks,
        global_batch_size=config.batch.global_batch_size,
        memory_bytes=room,
        g_inter=stages,
        members=[config.layout.g_tensor],
        microbatch_sizes=[config.batch.microbatch_size],
        split_backward=only_backward(config.pipeline),
        least_split_samples=least_split_samples(subject.survey, on_host=cluster.is_of_hosts),
    )


def split_trade(
    subject: SurveyedModel,
    cluster: Cluster | None,
    config: Config,
    grid: Grid,
    slack: int,
    room: float,
) -> Trade | None:
    """What split backwards cost and bring a run, where `pipeline.split_backward: auto` decides.

    `room` is what a rank may take, in bytes beside what the process holds before it builds
    anything. Without a cluster, `machine_of` says what is assumed. None if there is nothing to
    decide, or nothing that could wait: one stage, one microbatch, or products that are too small.
    """
    if only_backward(config.pipeline) is not None:
        return None
    question = replace(
        _of_grid(subject, cluster, config, grid),
        schedules=[configured_schedule(config.pipeline, slack=slack, is_split=False)],
        least_split_samples=0.0,  # the caller knows where the ranks compute
    )
    [whole], _ = try_layouts(question)
    if not may_split(question, whole.layout):
        return None
    question = replace(question, memory_bytes=room)
    return trade(question, "split backwards", whole, split_row(question, whole))


def _of_grid(
    subject: SurveyedModel, cluster: Cluster | None, config: Config, grid: Grid
) -> LayoutQuestion:
    """A question that has this grid alone as its answer, in any memory."""
    question = run_question(
        subject, machine_of(cluster), config, grid.size, [grid.g_inter], math.inf
    )
    return replace(question, members=[grid.g_tensor])


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
    """Memory of the fullest rank until the first checkpoint, without what the process holds before
    it builds anything."""
    step_seconds: float | None
    """Predicted seconds of a step; None without a cluster, whose constants would tell."""
    reason: str | None
    """Why there are this many stages; None if the configuration says so."""
    trades: Sequence[Trade] = ()
    """What options of the schedule that `auto` decides on cost and bring."""
    sum_bytes: int = 0
    """Bytes that a member sends to the other members of its stage in a step, on the stage that sums
    most."""


def predict(
    subject: SurveyedModel,
    cluster: Cluster | None,
    config: Config,
    grid: Grid,
    slack: int,
    reason: str | None,
) -> Prediction:
    """Predict a run whose layout is settled; `reason` is passed on.

    Backwards are whole where the configuration leaves that open.
    """
    schedule = configured_schedule(config.pipeline, slack=slack, is_split=False)
    question = _of_grid(subject, cluster, config, grid)
    [row], _ = try_layouts(replace(question, schedules=[schedule]))
    # The fullest stage while no checkpoint is being written.
    peak = max(stage.total - stage.checkpoint for stage in row.memory)
    seconds = None if cluster is None else row.seconds
    return Prediction(peak, seconds, reason, sum_bytes=max(row.sum_bytes))
