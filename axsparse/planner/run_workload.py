"""A configuration's run as a workload, and the layout that `layout.g_inter: auto` takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axsparse.config.schema import Config
from axsparse.models.survey import Survey
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster, Precision
from axsparse.planner.layout_search import (
    DEFAULT_SLACK,
    Rejection,
    Row,
    chosen_slack,
    slack_curve,
    try_layouts,
    with_slack,
)
from axsparse.planner.stage_memory import StageMemory, gigabytes, most_in_flight, stage_memory
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.state_bytes import IndexKind

AUTO_INDEX: IndexKind = "uint16"
"""Half of int32 at no time that shows in a step: docs/decisions/009-index-encodings.md."""


def has_costs(survey: Survey) -> bool:
    """Whether it is known what every layer computes and leaves behind."""
    return all(layer.activations is not None for layer in survey.layers)


def copied_bytes(config: Config) -> float:
    """Bytes of the host's memory that a rank's checkpoints may take while training goes on."""
    saves = config.checkpoint
    return saves.buffer * 1e9 if 0 < saves.every < config.train.steps else 0.0


def workload(
    config: Config,
    survey: Survey,
    name: str,
    kept: Mapping[str, int],
    optimizer: Optimizer,
    *,
    on_host: bool = True,
) -> SurveyedModel:
    """What the configuration trains; `kept` as in `SurveyedModel`. `on_host`: whether the memory
    that is planned is the host's, where the copies of checkpoints are."""
    samo, split = config.samo, config.layout.split
    gradients: Mapping[str, Precision] = {"half": config.precision, "fp32": "fp32"}
    return SurveyedModel(
        name=name,
        survey=survey,
        kept=kept,
        precision=config.precision,
        gradient="auto" if samo.gradient == "auto" else gradients[samo.gradient],
        moments=len(optimizer.moments),
        index=AUTO_INDEX if samo.index == "auto" else samo.index,
        split_master=samo.split_master,
        shard_optimizer=samo.shard_optimizer,
        offload=samo.offload,
        checkpoint_activations=config.pipeline.checkpoint_activations,
        checkpoint_buffer=copied_bytes(config) if on_host else 0.0,
        split=None if split == "auto" else split,
    )


def schedules(config: Config, *, has_times: bool) -> list[Schedule | None]:
    """What to try one after another until something fits.

    None lets the plan spend left-over memory on slack, which takes times that mean something.
    """
    pipeline = config.pipeline
    if pipeline.slack != "auto":
        return [Schedule(pipeline.schedule, pipeline.slack, pipeline.prefer)]
    if has_times and pipeline.schedule == "message-driven" and pipeline.prefer == "alternate":
        return [None]
    return [Schedule(pipeline.schedule, slack, pipeline.prefer) for slack in (DEFAULT_SLACK, 0)]


@dataclass(frozen=True)
class Choice:
    """A layout, and why it was taken."""

    row: Row
    room: float
    """Bytes that a rank may take."""
    smaller: Rejection | None
    """The layout of fewer stages that came closest."""

    @property
    def reason(self) -> str:
        """Why so many stages, in a few words."""
        room = f"{gigabytes(self.room)} GB a rank"
        if self.smaller is None:
            return f"fits {room}"
        return f"the fewest that fit {room} (with {self.smaller.g_inter}, {self.smaller.reason})"


def choose_layout(
    subject: SurveyedModel,
    cluster: Cluster,
    config: Config,
    ranks: int,
    candidates: Sequence[int],
    room: float,
    *,
    has_times: bool,
) -> Choice | Rejection:
    """The first of `candidates`, numbers of stages in rising order, that fits; else the last.

    The microbatch size is the configuration's.
    """
    rejected: list[Rejection] = []
    for stages in candidates:
        for schedule in schedules(config, has_times=has_times):
            rows, found = try_layouts(
                subject,
                cluster,
                ranks,
                global_batch_size=config.batch.global_batch_size,
                schedule=schedule,
                g_inter=[stages],
                microbatch_sizes=[config.batch.microbatch_size],
                room=room,
            )
            if rows:
                best = rows[0]
                if schedule is None:
                    curve = slack_curve(cluster, best, room)
                    best = with_slack(cluster, best, chosen_slack(curve))
                return Choice(best, room, rejected[-1] if rejected else None)
        rejected += found
    return rejected[-1]


@dataclass(frozen=True)
class Prediction:
    """What a run is predicted to take, on its fullest rank."""

    memory_bytes: float
    """Beside what the process holds before it builds anything, and until the first checkpoint."""
    step_seconds: float | None
    """None without a cluster's constants."""
    reason: str | None
    """Why this many stages; None if the configuration says so."""


def predict(
    subject: SurveyedModel,
    cluster: Cluster | None,
    config: Config,
    grid: Grid,
    slack: int,
    reason: str | None,
) -> Prediction:
    """Of a layout that is settled."""
    share = config.batch.global_batch_size // grid.g_data
    microbatches = share // config.batch.microbatch_size
    schedule = Schedule(config.pipeline.schedule, slack, config.pipeline.prefer)
    if cluster is None:
        loads = subject.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
        assert loads is not None, "there is no limit"
        memory = [
            stage_memory(
                load,
                microbatch_size=config.batch.microbatch_size,
                in_flight=most_in_flight(
                    schedule, stage=stage, g_inter=grid.g_inter, microbatches=microbatches
                ),
                overhead=0.0,
            )
            for stage, load in enumerate(loads)
        ]
        return Prediction(_until_saved(memory), None, reason)
    [row], _ = try_layouts(
        subject,
        cluster,
        grid.size,
        global_batch_size=config.batch.global_batch_size,
        schedule=schedule,
        g_inter=[grid.g_inter],
        microbatch_sizes=[config.batch.microbatch_size],
        room=math.inf,
    )
    return Prediction(_until_saved(row.memory), row.seconds, reason)


def _until_saved(memory: Sequence[StageMemory]) -> float:
    """Bytes of the fullest stage as long as nothing is on its way to the disk."""
    return max(stage.total - stage.checkpoint for stage in memory)
