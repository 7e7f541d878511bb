"""Finds the layout that a model should train in on a number of devices, and says why.

Every (G_inter, G_tensor, G_data, microbatch size) of the devices is either rejected with a reason
or simulated. The smallest model parallelism G_inter · G_tensor that fits is recommended (the
paper's rule, section IV-B: bubble and messages grow with it), at its fastest stages,
tensor-parallel ranks and microbatch size. The other layouts are ranked by their predicted step, so
that everyone sees how much the rule gains or loses. Devices are left over where a step is no slower
without them: replicas take entire microbatches, some one more than others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from axsparse.config.validate import counted
from axsparse.planner.cluster import Cluster
from axsparse.planner.layout import Layout, LayoutQuestion, Row, simulate_layout
from axsparse.planner.stage_memory import needed
from axsparse.planner.step_cost import step_costs
from axsparse.planner.workload import StageLoad, Workload
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

if TYPE_CHECKING:
    from axsparse.planner.baselines import Baseline

MOST_ROOM = 0.85
"""The part of a rank's memory budget beyond which no slack is taken: plans are estimates, and a
machine that is nearly full is slow."""


@dataclass(frozen=True)
class Rejection:
    """A layout that cannot run, and why."""

    g_inter: int
    """1 also where no number of stages would help."""
    g_data: int
    microbatch_size: int | None
    """None: no size would help."""
    reason: str
    g_tensor: int = 1

    @property
    def layout(self) -> str:
        """The rejected layout, in words."""
        members = f" × {counted(self.g_tensor, 'member')}" * (self.g_tensor > 1)
        return f"{counted(self.g_inter, 'stage')}{members}"


@dataclass(frozen=True)
class Plan:
    """All layouts of a number of devices, and the recommended one, which may leave some over."""

    workload: Workload
    cluster: Cluster
    gpus: int
    memory_bytes: float
    """The memory budget of a rank."""
    rows: Sequence[Row]
    """The layouts that fit: the recommended one first, then the others by predicted step."""
    rejected: Sequence[Rejection]
    method: str = ""
    """The subject of the plan, such as "dense", where several are compared."""
    taken: Mapping[str, object] = field(default_factory=dict)
    """Settings in addition to the layout that the plan chose, as the configuration says nothing of
    them."""
    recomputes: bool = False
    """Whether activations are recomputed."""
    baselines: Sequence[Baseline] = ()
    """Other ways of dense training, where the model has been surveyed."""

    @property
    def recommended(self) -> Row:
        """The fastest layout of the smallest model parallelism that fits; of fewer devices, if that
        is as fast."""
        return self.rows[0]

    def margin(self, row: Row) -> float:
        """How much longer a row's step takes than the recommended one's: 0.1 is 10 % longer, and
        a negative margin is faster."""
        return row.seconds / self.recommended.seconds - 1


class NoLayoutError(ConfigError):
    """No layout of a question fits."""

    def __init__(self, text: str, rejected: Sequence[Rejection]) -> None:
        super().__init__(text)
        self.rejected = rejected


def plan(question: LayoutQuestion) -> Plan:
    """Try every layout; NoLayoutError if none fits."""
    workload, cluster, gpus = question.workload, question.cluster, question.gpus
    if gpus < 1:
        raise ConfigError(f"gpus: {gpus} devices train nothing; plan for at least 1")
    rows, rejected = try_layouts(question)
    asked = [row for row in rows if row.layout.microbatch_size == question.usual_size] or rows
    fewest = min((row.layout.grid.parallelism for row in asked), default=gpus)
    fitting = [row for row in rows if row.layout.grid.parallelism == fewest]
    best = min(fitting, key=lambda row: row.seconds, default=None)
    if question.may_leave:
        best = _on_fewer(question, fewest, best)
    if best is None:
        last = next((each for each in reversed(rejected) if each.g_data), rejected[-1])
        raise NoLayoutError(
            f"{workload.name} fits no layout of {counted(gpus, 'device')} of "
            f"{cluster.name}; with {last.layout} {last.reason}; take more "
            "devices, or prune more",
            rejected,
        )
    others = sorted((r for r in rows if r is not best), key=lambda row: row.seconds)
    return Plan(workload, cluster, gpus, question.room, [best, *others], rejected)


def _on_fewer(question: LayoutQuestion, most: int, best: Row | None) -> Row | None:
    """The fastest layout that leaves some devices over and is no slower than `best`, which takes
    all of them; else `best`. A replica has `most` devices at most.

    A step lasts as long as the replica that takes most of the microbatches. So as many replicas do
    as are needed for none to take more, and the number of stages need not divide the number of
    devices.
    """
    for members in question.members:
        used = replace(question, gpus=question.gpus - question.gpus % members)
        if why_not_members(used, members) is not None:
            continue
        limit = min(most, question.gpus) // members
        for stages in question.g_inter or range(1, limit + 1):
            for size in question.microbatch_sizes or _powers_of_two(question.global_batch_size, 1):
                microbatches = -(-question.global_batch_size // size)
                replicas = question.gpus // (stages * members)
                if not replicas:
                    break
                grid = Grid(stages, -(-microbatches // -(-microbatches // replicas)), members)
                if grid.size == question.gpus or _impossible(question, grid) is not None:
                    continue
                tried = _try_size(question, grid, size)
                if isinstance(tried, Rejection):
                    break
                is_faster = best is None or tried.seconds <= best.seconds
                if is_faster and _is_fewest(question, grid, question.usual_size or size):
                    best = tried
    return best


def _is_fewest(question: LayoutQuestion, grid: Grid, size: int) -> bool:
    """Whether no fewer stages fit the ranks of a grid, so that training takes as many there."""
    ranks = grid.g_inter * grid.g_data
    smaller = (
        Grid(stages, ranks // stages, grid.g_tensor)
        for stages in range(1, grid.g_inter)
        if ranks % stages == 0 and stages in (question.g_inter or [stages])
    )
    return all(
        _impossible(question, each) is not None
        or isinstance(_try_size(question, each, size), Rejection)
        for each in smaller
    )


def try_layouts(question: LayoutQuestion) -> tuple[list[Row], list[Rejection]]:
    """The layouts that fit, and the rejected ones, in the order in which they are tried.

    ConfigError if the question has one number of tensor-parallel ranks, and the model cannot be
    sharded so.
    """
    rows: list[Row] = []
    rejected: list[Rejection] = []
    for members in question.members:
        why = why_not_members(question, members)
        if why is not None:
            rejected.append(Rejection(1, 0, None, why, members))
            continue
        of_stages = question.gpus // members
        for stages in question.g_inter or [
            n for n in range(1, of_stages + 1) if of_stages % n == 0
        ]:
            if of_stages % stages:
                uneven = f"{stages} does not divide {counted(of_stages, 'device')}"
                rejected.append(Rejection(stages, 0, None, uneven, members))
                continue
            grid = Grid(stages, of_stages // stages, members)
            fitting, others = _try_grid(question, grid)
            rows += fitting
            rejected += others
    return rows, rejected


def why_not_members(question: LayoutQuestion, members: int) -> str | None:
    """The reason why no number of stages can have so many tensor-parallel ranks; None if some can.

    With one number in the question nodes are not looked at, and ConfigError says why the model
    cannot be sharded.
    """
    gpus, on_node = question.gpus, question.cluster.gpus_per_node
    if gpus % members:
        return f"{counted(members, 'member')} do not divide {counted(gpus, 'device')}"
    if len(question.members) == 1:
        question.workload.of_member(members)
        return None
    # Ranks fill one node after the other.
    if members > on_node or (gpus > on_node and on_node % members):
        return f"some would be on another node, as nodes have {counted(on_node, 'device')}"
    try:
        question.workload.of_member(members)
    except ConfigError as error:
        return str(error)
    return None


def _try_grid(question: LayoutQuestion, grid: Grid) -> tuple[list[Row], list[Rejection]]:
    """The microbatch sizes at which this grid fits, and the sizes at which it does not."""
    rows: list[Row] = []
    why, sizes = _impossible(question, grid), question.microbatch_sizes
    if why is not None:
        return rows, [Rejection(grid.g_inter, grid.g_data, None, why, grid.g_tensor)]
    rejected: list[Rejection] = []
    for size in sizes or _powers_of_two(question.global_batch_size, grid.g_data):
        tried = _try_size(question, grid, size)
        if isinstance(tried, Row):
            rows.append(tried)
            continue
        rejected.append(tried)
        if sizes is None:
            break  # larger microbatches need more memory
    return rows, rejected


def _impossible(question: LayoutQuestion, grid: Grid) -> str | None:
    """Why no microbatch size can run on this grid; None if some can."""
    most, batch = question.workload.most_stages, question.global_batch_size
    if grid.g_inter > most:
        return f"the model can be cut into {most} stages at most"
    if batch < grid.g_data:
        return f"{grid.g_data} replicas share a batch of {batch}"
    return None


def _try_size(question: LayoutQuestion, grid: Grid, size: int) -> Row | Rejection:
    """One grid at one microbatch size, under the first of the question's schedules that fits."""
    microbatches = -(-question.global_batch_size // size)
    if size > question.global_batch_size or microbatches < grid.g_data:
        reason = f"microbatches of {size} make too few of a batch of {question.global_batch_size}"
        return Rejection(grid.g_inter, grid.g_data, size, reason, grid.g_tensor)
    split = question.split_backward
    is_split = grid.g_inter > 1 if split is None else split
    for schedule in question.schedules:
        room = question.room
        if schedule.slack > question.schedules[-1].slack:
            room *= MOST_ROOM
        schedule = replace(schedule, split_backward=is_split)
        layout = Layout(grid, schedule, size, -(-microbatches // grid.g_data))
        workload = question.workload.of_member(grid.g_tensor)
        loads = split_layers(workload, layout, question.cluster.overhead_bytes, room)
        if not isinstance(loads, Rejection):
            return _row(question, layout, loads)
        rejection = loads
    return rejection


def split_layers(
    workload: Workload, layout: Layout, overhead: float, room: float
) -> Sequence[StageLoad] | Rejection:
    """The loads of the stages, with their work balanced as well as `room` bytes a rank allow.

    `overhead` is as in `Cluster.overhead_bytes`. If no split fits, the reason is the memory of the
    fullest stage of the best balanced split.
    """
    grid, microbatches = layout.grid, layout.microbatches
    balanced = workload.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
    assert balanced is not None, "there is no limit"
    memory = layout.memory(balanced, overhead)
    most, fullest = max((stage.total, number) for number, stage in enumerate(memory))
    if most <= room:
        return balanced

    def has_room(stage: int, load: StageLoad) -> bool:
        return layout.stage_memory(stage, load, overhead).total <= room

    loads = None
    if sum(load.state.total for load in balanced) <= room * grid.g_inter:
        loads = workload.stages(grid.g_inter, grid.g_data, has_room, microbatches=microbatches)
    if loads is not None:
        return loads
    reason = f"stage {fullest} needs {needed(most, room)}"
    return Rejection(grid.g_inter, grid.g_data, layout.microbatch_size, reason, grid.g_tensor)


def _row(question: LayoutQuestion, layout: Layout, loads: Sequence[StageLoad]) -> Row:
    """Simulate a layout that fits."""
    workload, cluster, grid = question.workload, question.cluster, layout.grid
    costs = step_costs(workload, loads, cluster, grid, layout.microbatch_size)
    run = simulate_layout(costs, cluster, layout)
    flops = question.global_batch_size * workload.sample_flops
    peak = grid.size * cluster.peak(workload.precision)
    return Row(
        layout=layout,
        loads=loads,
        memory=layout.memory(loads, cluster.overhead_bytes),
        costs=costs,
        run=run,
        percent_of_peak=100 * flops / (run.seconds * peak),
    )


def _powers_of_two(batch: int, replicas: int) -> list[int]:
    """The powers of two that divide a batch and leave each replica a microbatch, smallest first."""
    sizes = (2**n for n in range((batch // replicas).bit_length()))
    return [size for size in sizes if batch % size == 0]
