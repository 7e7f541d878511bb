"""A layout on a number of devices, the search request to the planner, and its result.

`Layout` has the memory that each of its stages needs; `Candidate` adds its predicted step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import StageMemory, peak_in_flight, stage_memory
from axsparse.planner.step_cost import StepCosts, StepRun
from axsparse.planner.workload import StageLoad, Workload
from axsparse.runtime.grid import Grid
from axsparse.samo.state_bytes import WeightKind

DEFAULT_EXTRA_IN_FLIGHT = 1


@dataclass(frozen=True)
class Layout:
    """The numbers of stages, tensor-parallel ranks and replicas, and how the microbatches of a step
    go through them."""

    grid: Grid
    schedule: Schedule
    microbatch_size: int
    """Samples of a microbatch."""
    microbatches: int
    """Number of microbatches of a replica in a step; of the one that takes most, if they differ."""

    def stage_memory(self, stage: int, load: StageLoad, overhead: float) -> StageMemory:
        """The memory of this stage on one rank, if it has this load. `overhead` as in
        `Cluster.overhead_bytes`."""
        held = peak_in_flight(
            self.schedule,
            stage=stage,
            g_inter=self.grid.g_inter,
            microbatches=self.microbatches,
            size=load.deferred_size,
        )
        return stage_memory(
            load, microbatch_size=self.microbatch_size, in_flight=held, overhead=overhead
        )

    def sum_bytes(self, load: StageLoad) -> int:
        """Bytes that a tensor-parallel rank of a stage of this load sends to others in a step."""
        sums = load.forward_sums + load.backward_sums
        return self.microbatches * sums.sent(self.microbatch_size)

    def memory(self, loads: Sequence[StageLoad], overhead: float) -> list[StageMemory]:
        """The memory of each stage on one rank; `loads` has one entry a stage."""
        return [self.stage_memory(stage, load, overhead) for stage, load in enumerate(loads)]


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search request to the planner: the model, the devices, and the layouts to try."""

    workload: Workload
    sparse: Workload | None = None
    """The same training with pruned weights that are sparse at rest, an option next to `workload`;
    None: weights are stored as `workload` says."""
    cluster: Cluster
    gpus: int
    """Number of devices; a layout uses all of them, unless it may leave some."""
    may_leave: bool = False
    """Whether a layout may leave devices over if a step is no slower without them."""
    global_batch_size: int
    """Samples of a step."""
    memory_bytes: float | None = None
    """The memory budget of a rank; None: all memory of a device."""
    schedules: Sequence[Schedule] = (
        Schedule("message-driven", DEFAULT_EXTRA_IN_FLIGHT, "alternate"),
        Schedule("message-driven", 0, "alternate"),
    )
    """Tried in this order until one fits, with fewer and fewer extra microbatches in flight; more
    than the fewest are an option."""
    split_backward: bool | None = None
    """Whether backwards are split under each of them; None: where there are several stages."""
    g_inter: Sequence[int] | None = None
    """The numbers of stages to try, in this order; None: every divisor of `gpus` / tensor-parallel
    ranks."""
    g_tensor: Sequence[int] = (1,)
    """The numbers of tensor-parallel ranks to try for each stage."""
    microbatch_sizes: Sequence[int] | None = None
    """The sizes to try, in samples; None: every power of two that divides the batch."""
    usual_size: int | None = None
    """The microbatch size at which the number of stages is decided where it fits, as training
    decides; None: whichever size needs fewest."""

    @property
    def ways(self) -> Iterator[tuple[WeightKind, Workload]]:
        """How pruned weights may be stored at rest, the faster way first."""
        yield "dense", self.workload
        if self.sparse is not None:
            yield "sparse", self.sparse

    @property
    def rank_budget(self) -> float:
        """Bytes that a rank may take."""
        return self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, its memory and its predicted step."""

    layout: Layout
    loads: Sequence[StageLoad]
    """The compute and memory load of each stage."""
    memory: Sequence[StageMemory]
    """The memory of each stage on one rank."""
    costs: StepCosts
    run: StepRun
    percent_of_peak: float
    weights: WeightKind = "dense"
    """How pruned weights are stored at rest, where the request leaves that open."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.run.seconds

    @property
    def fullest(self) -> int:
        """The number of the stage that needs most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def sum_bytes(self) -> list[int]:
        """`Layout.sum_bytes` of each stage."""
        return [self.layout.sum_bytes(load) for load in self.loads]

    @property
    def most_bytes(self) -> float:
        """Memory of the fullest stage."""
        return self.memory[self.fullest].total
