"""Finds the layout that a model should train in on a number of devices, and says why.

Every (G_inter, G_data, microbatch size) of the devices is either rejected with a reason or
simulated. The smallest G_inter that fits is recommended (the paper's rule, section IV-B), at its
fastest microbatch size. The other layouts are ranked by their predicted step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from axsparse.config.schema import PipelineConfig
from axsparse.config.section import counted, divisors
from axsparse.pipeline.policy import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import (
    StageLoad,
    StageMemory,
    needed,
    peak_in_flight,
    stage_memory,
)
from axsparse.planner.step_cost import StepRun, simulate_step, step_costs
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

if TYPE_CHECKING:
    from axsparse.planner.profiled_model import ProfiledModel


DEFAULT_EXTRA_IN_FLIGHT = 1
WeightWay: TypeAlias = Literal["dense", "sparse", "gathered"]
"""How pruned weights are stored where that is open; `gathered` is ZeRO stage 3."""
WAYS: Mapping[WeightWay, str] = {
    "dense": "",
    "sparse": "weights sparse at rest",
    "gathered": "weights sparse at rest and gathered by replicas",
}
GATHERED = {"samo.weights": "sparse", "samo.zero_stage": 3}


@dataclass(frozen=True)
class Layout:
    """The numbers of stages, tensor-parallel ranks and replicas, and how the microbatches of a step
    go through them."""

    grid: Grid
    schedule: Schedule
    microbatch_size: int
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

    model: ProfiledModel
    others: Mapping[WeightWay, ProfiledModel] = field(default_factory=dict)
    """The same training with pruned weights stored in other ways that are open; `gathered` is tried
    where nothing else fits."""
    cluster: Cluster
    gpus: int
    """Number of devices, all of which a layout uses."""
    global_batch_size: int
    rank_budget: float
    schedules: Sequence[Schedule] = (
        Schedule("message-driven", DEFAULT_EXTRA_IN_FLIGHT),
        Schedule("message-driven", 0),
    )
    """Tried in this order until one fits, with fewer and fewer extra microbatches in flight; more
    than the fewest are an option."""
    g_inter: Sequence[int] | None = None
    """The numbers of stages to try, in this order; None: every divisor of `gpus` / tensor-parallel
    ranks."""
    g_tensor: int = 1
    microbatch_sizes: Sequence[int] | None = None
    """The sizes to try, in samples; None: powers of two, see `sizes`."""
    usual_size: int | None = None
    """The microbatch size at which the number of stages is decided where it fits, as training
    decides; None: whichever size needs fewest."""

    @property
    def method(self) -> Literal["samo", "dense"]:
        return "samo" if self.model.is_pruned else "dense"

    def microbatches(self, size: int) -> int:
        """Microbatches of `size` samples per step over all replicas."""
        return -(-self.global_batch_size // size)

    def sizes(self, replicas: int) -> Sequence[int]:
        """The microbatch sizes to try on `replicas`, smallest first: by default the powers of
        two that divide the batch and leave each replica a microbatch."""
        if self.microbatch_sizes is not None:
            return self.microbatch_sizes
        sizes = (2**n for n in range((self.global_batch_size // replicas).bit_length()))
        return [size for size in sizes if self.global_batch_size % size == 0]


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, its memory and its predicted step."""

    layout: Layout
    loads: Sequence[StageLoad]
    memory: Sequence[StageMemory]
    run: StepRun
    percent_of_peak: float
    weights: WeightWay = "dense"
    """How pruned weights are stored at rest, where the request leaves that open."""

    @property
    def seconds(self) -> float:
        return self.run.seconds

    @property
    def fullest(self) -> int:
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def sum_bytes(self) -> list[int]:
        return [self.layout.sum_bytes(load) for load in self.loads]

    @property
    def most_bytes(self) -> float:
        return self.memory[self.fullest].total


MOST_ROOM = 0.85
"""The part of a rank's memory budget beyond which no extra microbatch is in flight: plans are
estimates, and a machine that is nearly full is slow."""


@dataclass(frozen=True)
class Rejection:
    """A layout that cannot run, and why."""

    g_inter: int
    g_data: int
    microbatch_size: int | None
    reason: str
    way: str = ""
    """A suggestion; empty where memory lacks."""


@dataclass(frozen=True)
class Plan:
    """All layouts of a number of devices, and the recommended one."""

    request: SearchRequest
    rows: Sequence[Candidate]
    """The layouts that fit: the recommended one first, then the others by predicted step."""
    rejected: Sequence[Rejection]
    taken: Mapping[str, object] = field(default_factory=dict)
    """Settings in addition to the layout that the plan chose, as the configuration says nothing of
    them."""

    @property
    def recommended(self) -> Candidate:
        """The fastest layout of the fewest stages that fit."""
        return self.rows[0]

    def margin(self, row: Candidate) -> float:
        """How much longer a row's step takes than the recommended one's: 0.1 is 10 % longer, and
        a negative margin is faster."""
        return row.seconds / self.recommended.seconds - 1


class NoLayoutError(ConfigError):
    """No layout of a search request fits."""

    def __init__(self, text: str, rejected: Sequence[Rejection]) -> None:
        super().__init__(text)
        self.rejected = rejected


def plan(request: SearchRequest) -> Plan:
    """Try every layout; NoLayoutError if none fits."""
    gpus = request.gpus
    if gpus < 1:
        raise ConfigError(f"gpus: {gpus} devices train nothing; plan for at least 1")
    rows, rejected = try_layouts(request)
    if not rows:
        last = rejected[-1]
        raise NoLayoutError(
            f"{request.model.config.name} fits no layout of {counted(gpus, 'device')} of "
            f"{request.cluster.name}; with {counted(last.g_inter, 'stage')} {last.reason}; "
            f"{last.way or 'take more devices, or prune more'}",
            rejected,
        )
    asked = [row for row in rows if row.layout.microbatch_size == request.usual_size] or rows
    fewest = min(row.layout.grid.g_inter for row in asked)
    rows.sort(key=lambda row: row.seconds)
    best = next(row for row in rows if row.layout.grid.g_inter == fewest)
    return Plan(request, [best, *(row for row in rows if row is not best)], rejected)


def try_layouts(request: SearchRequest) -> tuple[list[Candidate], list[Rejection]]:
    """The layouts that fit, and the rejected ones, in the order in which they are tried;
    ConfigError for a model that cannot be sharded over the request's tensor-parallel ranks."""
    request.model.tp_shard(request.g_tensor)
    rows: list[Candidate] = []
    rejected: list[Rejection] = []
    of_stages = request.gpus // request.g_tensor
    for stages in request.g_inter or divisors(of_stages):
        grid = Grid(stages, of_stages // stages, request.g_tensor)
        assert grid.size == request.gpus, "the stages and tensor-parallel ranks divide the devices"
        fitting, others = _try_grid(request, grid)
        rows += fitting
        rejected += others
    return rows, rejected


def _has_a_grid(size: int, most_stages: int, batch: int) -> bool:
    """Whether some number of stages leaves each replica a sample of the batch."""
    return any(n <= most_stages and size // n <= batch for n in divisors(size))


def _try_grid(request: SearchRequest, grid: Grid) -> tuple[list[Candidate], list[Rejection]]:
    rows: list[Candidate] = []
    most, batch = request.model.most_stages, request.global_batch_size
    if grid.g_inter > most or batch < grid.g_data:
        why = f"{grid.g_data} replicas share a batch of {batch}"
        way = "take more stages (layout.g_inter), fewer devices, or a larger batch"
        if grid.g_inter > most:
            why = f"the model can be cut into {most} stages at most"
            way = "choose fewer stages (layout.g_inter)"
        of_stages = grid.g_inter * grid.g_data
        if not _has_a_grid(of_stages, most, batch):
            fewer = next(n for n in range(of_stages, 0, -1) if _has_a_grid(n, most, batch))
            way = f"take {fewer * grid.g_tensor} devices, or a larger batch"
        return rows, [Rejection(grid.g_inter, grid.g_data, None, why, way)]
    rejected: list[Rejection] = []
    for size in request.sizes(grid.g_data):
        fitting: list[Candidate] = []
        for weights, model in {"dense": request.model, **request.others}.items():
            if weights == "gathered" and (fitting or grid.g_data == 1):
                continue
            found = _try_size(replace(request, model=model), grid, size, weights)
            if isinstance(found, Candidate):
                fitting.append(found)
            else:
                rejection = found
        rows += fitting
        if fitting:
            continue
        rejected.append(rejection)
        if request.microbatch_sizes is None:
            break  # larger microbatches need more memory
    return rows, rejected


def _try_size(
    request: SearchRequest, grid: Grid, size: int, weights: WeightWay
) -> Candidate | Rejection:
    microbatches = request.microbatches(size)
    if microbatches < grid.g_data:
        reason = f"microbatches of {size} make too few of a batch of {request.global_batch_size}"
        way = (
            "choose smaller microbatches (batch.microbatch_size; of axsparse plan "
            "--microbatch-size), more stages, or a larger batch"
        )
        return Rejection(grid.g_inter, grid.g_data, size, reason, way)
    cluster, model = request.cluster, request.model.tp_shard(grid.g_tensor)
    is_split = splits_backward(model.config.pipeline, grid.g_inter)
    for schedule in request.schedules:
        rank_budget = request.rank_budget
        if schedule.extra_in_flight > request.schedules[-1].extra_in_flight:
            rank_budget *= MOST_ROOM
        schedule = replace(schedule, split_backward=is_split)
        layout = Layout(grid, schedule, size, -(-microbatches // grid.g_data))
        loads = split_layers(model, layout, cluster.overhead_bytes, rank_budget)
        if isinstance(loads, Rejection):
            rejection = loads
            continue
        costs = step_costs(request.model, loads, cluster, grid, size, layout.microbatches)
        run = simulate_step(costs, cluster, grid, schedule, layout.microbatches)
        flops = request.global_batch_size * request.model.sample_flops
        peak = grid.size * cluster.peak(model.precision)
        return Candidate(
            layout=layout,
            loads=loads,
            memory=layout.memory(loads, cluster.overhead_bytes),
            run=run,
            percent_of_peak=100 * flops / (run.seconds * peak) if run.seconds else 0.0,
            weights=weights,
        )
    return rejection


def splits_backward(pipeline: PipelineConfig, g_inter: int) -> bool:
    """Whether backwards are split, for `pipeline.split_backward: auto` where there are several
    stages.

    Splitting is of use where arrivals decide, and where nothing fuses full backwards. Where
    activations are recomputed, deferred gradients would take many times the memory of the rest.
    """
    if pipeline.split_backward != "auto":
        return pipeline.split_backward
    is_free = pipeline.schedule == "message-driven" and pipeline.compile is not True
    return g_inter > 1 and is_free and not pipeline.checkpoint_activations


def split_layers(
    model: ProfiledModel, layout: Layout, overhead: float, rank_budget: float
) -> Sequence[StageLoad] | Rejection:
    """The loads of the stages, with their work balanced as well as `rank_budget` bytes a rank
    allow; else the reason is the memory of the fullest stage of the best balanced split."""
    grid, microbatches = layout.grid, layout.microbatches
    balanced = model.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
    assert balanced is not None, "there is no limit"
    memory = layout.memory(balanced, overhead)
    most, fullest = max((stage.total, number) for number, stage in enumerate(memory))
    if most <= rank_budget:
        return balanced

    def fits_budget(stage: int, load: StageLoad) -> bool:
        return layout.stage_memory(stage, load, overhead).total <= rank_budget

    loads = None
    if sum(load.state.total for load in balanced) <= rank_budget * grid.g_inter:
        loads = model.stages(grid.g_inter, grid.g_data, fits_budget, microbatches=microbatches)
    if loads is not None:
        return loads
    reason = f"stage {fullest} needs {needed(most, rank_budget)}"
    return Rejection(grid.g_inter, grid.g_data, layout.microbatch_size, reason)
