"""What the planner says of the memory of a run that has a checkpoint: by stage and category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.models.zoo.model_registry import model_without_weights
from axsparse.planner.layout import Layout
from axsparse.planner.run_workload import configured_schedule, workload
from axsparse.planner.stage_memory import StageMemory
from axsparse.pruning.targets import kept_at_start, what_is_pruned
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.optimizer import optimizer_of
from axsparse.samo.precision import DTYPES


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of each stage's rank."""

    now: list[StageMemory]
    """With the entries that the checkpoint has kept."""
    dense: list[StageMemory]
    """If nothing were pruned."""


def planned_memory(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    kept: Mapping[str, int],
    predicted: float,
) -> PlannedMemory | None:
    """The memory of a run as planned; None if the run trained a model of the user's own.

    `config` is resolved; `shapes` and `kept` are those of the checkpoint, and `predicted` is the
    peak in bytes that the run told at its start: what it has beyond the categories is what the
    process held before. Raises ConfigError, DataError or MissingInputError if the configuration or
    its ticket does not suit this version.
    """
    layout, pipeline, optimizer = config.layout, config.pipeline, optimizer_of(config.optimizer)
    if isinstance(layout.g_inter, str) or isinstance(layout.g_data, str):
        return None
    loaded = LoadedConfig(config, "run", {})
    surveyed = survey(model_without_weights(loaded), DTYPES[config.precision])
    is_settled = "auto" not in (pipeline.slack, pipeline.split_backward)
    if surveyed.shapes != shapes or not is_settled:
        return None
    grid = Grid(layout.g_inter, layout.g_data)
    microbatches = config.batch.global_batch_size // grid.g_data // config.batch.microbatch_size
    planned = Layout(
        grid, configured_schedule(pipeline), config.batch.microbatch_size, microbatches
    )

    def memory(
        entries: Mapping[str, int], overhead: float, *, at_start: bool = False
    ) -> list[StageMemory]:
        subject = workload(config, surveyed, "run", entries, optimizer)
        if not at_start:
            subject = replace(subject, calibration=None)
        loads = subject.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
        assert loads is not None, "there is no limit"
        # The peak that a run predicts is that of its steps, without copies for checkpoints.
        return [replace(one, checkpoint=0.0) for one in planned.memory(loads, overhead)]

    start = memory(kept_at_start(config, *what_is_pruned(config, surveyed)), 0.0, at_start=True)
    overhead = max(0.0, predicted - max(stage.total for stage in start))
    return PlannedMemory(memory(kept, overhead), memory({}, overhead))
