"""One way to train on a number of devices, and the memory that each of its stages needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.stage_memory import StageMemory, most_held, stage_memory
from axsparse.planner.workload import StageLoad
from axsparse.runtime.grid import Grid


@dataclass(frozen=True)
class Layout:
    """Stages and replicas, and how the microbatches of a step go through them."""

    grid: Grid
    schedule: Schedule
    microbatch_size: int
    """Samples of a microbatch."""
    microbatches: int
    """Number of microbatches of each replica in a step."""

    def stage_memory(self, stage: int, load: StageLoad, overhead: float) -> StageMemory:
        """What this stage needs on one rank, if it has this load. `overhead` as in
        `Cluster.overhead_bytes`."""
        sizes = (load.deferred_size,) * self.grid.g_inter
        held = most_held(
            replace(self.schedule, deferred_sizes=sizes),
            stage=stage,
            g_inter=self.grid.g_inter,
            microbatches=self.microbatches,
        )
        return stage_memory(
            load, microbatch_size=self.microbatch_size, in_flight=held, overhead=overhead
        )

    def with_sizes(self, loads: Sequence[StageLoad]) -> Layout:
        """This layout, its schedule told what deferred microbatches of these loads take."""
        if not self.schedule.split_backward:
            return replace(self, schedule=replace(self.schedule, deferred_sizes=()))
        sizes = tuple(load.deferred_size for load in loads)
        return replace(self, schedule=replace(self.schedule, deferred_sizes=sizes))

    def memory(self, loads: Sequence[StageLoad], overhead: float) -> list[StageMemory]:
        """What each stage needs on one rank; `loads` has one entry a stage."""
        return [self.stage_memory(stage, load, overhead) for stage, load in enumerate(loads)]
