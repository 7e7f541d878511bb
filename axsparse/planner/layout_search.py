"""Which layout a model should train in on so many devices, why, and how long a step takes.

Every (G_inter, G_data, microbatch size) of the devices is either rejected with a reason or
simulated. The smallest G_inter that fits is recommended (the paper's rule, section IV-B:
bubble and messages grow with it), at its fastest microbatch size; all others are ranked by
their predicted step, so that the margin of the rule is seen, also where it loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import StageMemory, most_in_flight, needed, stage_memory
from axsparse.planner.step_cost import StepCosts, step_costs
from axsparse.planner.step_simulation import StepRun, simulate_step
from axsparse.planner.workload import StageLoad, Workload
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

DEFAULT_SLACK = 1
PAYS = 0.005
"""What a deeper slack has to save of a step to be worth its memory."""
PLAYED_REPLICAS = 4
"""With jitter: enough to tell layouts apart."""
Costing: TypeAlias = Callable[[Workload, Sequence[StageLoad], Cluster, Grid, int], StepCosts]
"""Seconds of a layout at a microbatch size; `step_costs`, or what was measured."""


@dataclass(frozen=True)
class Row:
    """A layout that fits."""

    grid: Grid
    microbatch_size: int
    microbatches: int
    """Of each replica."""
    schedule: Schedule
    loads: Sequence[StageLoad]
    memory: Sequence[StageMemory]
    """Of each stage, on one rank."""
    costs: StepCosts
    run: StepRun
    percent_of_peak: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.run.seconds

    @property
    def fullest(self) -> int:
        """The stage that needs most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)


@dataclass(frozen=True)
class Rejection:
    """A layout that cannot run, and why."""

    g_inter: int
    g_data: int
    microbatch_size: int | None
    """None: none would help."""
    reason: str


@dataclass(frozen=True)
class SlackPoint:
    """What a slack costs and gives."""

    slack: int
    seconds: float
    """Of a step."""
    bytes: float
    """Of the fullest stage."""


@dataclass(frozen=True)
class Plan:
    """All layouts of a number of devices."""

    workload: Workload
    cluster: Cluster
    gpus: int
    memory_bytes: float
    """What a rank may take."""
    rows: Sequence[Row]
    """The recommended one first, then by predicted step."""
    rejected: Sequence[Rejection]
    slack_curve: Sequence[SlackPoint]
    """Of the recommended layout: each slack that fits, with the same delays. Empty if the slack
    was given."""

    @property
    def recommended(self) -> Row:
        """The smallest G_inter that fits, at its fastest microbatch size."""
        return self.rows[0]

    def margin(self, row: Row) -> float:
        """How much longer a row's step takes than the recommended one's; below 0: it is faster."""
        return row.seconds / self.recommended.seconds - 1


def plan(
    workload: Workload,
    cluster: Cluster,
    gpus: int,
    *,
    global_batch_size: int,
    schedule: Schedule | None = None,
    g_inter: Sequence[int] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    memory_bytes: float | None = None,
    costing: Costing = step_costs,
) -> Plan:
    """Try every layout of `gpus` devices.

    `schedule` None is message-driven with the slack that pays; `g_inter` and
    `microbatch_sizes` None try every divisor of the devices and every power of two;
    `memory_bytes` None is a whole device. ConfigError if nothing fits.
    """
    if gpus < 1:
        raise ConfigError(f"gpus: {gpus} devices train nothing; plan for at least 1")
    room = cluster.memory_bytes if memory_bytes is None else memory_bytes
    rows, rejected = try_layouts(
        workload,
        cluster,
        gpus,
        global_batch_size=global_batch_size,
        schedule=schedule,
        g_inter=g_inter,
        microbatch_sizes=microbatch_sizes,
        room=room,
        costing=costing,
    )
    if not rows:
        last = rejected[-1]
        raise ConfigError(
            f"gpus: {workload.name} fits no layout of {gpus} devices of {cluster.name}; with "
            f"{last.g_inter} stages {last.reason}; take more devices, or prune more"
        )
    fewest = min(row.grid.g_inter for row in rows)
    best = min((r for r in rows if r.grid.g_inter == fewest), key=lambda row: row.seconds)
    others = sorted((r for r in rows if r is not best), key=lambda row: row.seconds)
    curve: list[SlackPoint] = []
    if schedule is None:
        curve = slack_curve(cluster, best, room)
        best = with_slack(cluster, best, chosen_slack(curve))
    return Plan(workload, cluster, gpus, room, [best, *others], rejected, curve)


def try_layouts(
    workload: Workload,
    cluster: Cluster,
    gpus: int,
    *,
    global_batch_size: int,
    schedule: Schedule | None,
    g_inter: Sequence[int] | None,
    microbatch_sizes: Sequence[int] | None,
    room: float,
    costing: Costing = step_costs,
) -> tuple[list[Row], list[Rejection]]:
    """What fits, and what does not; arguments as for `plan`."""
    tried = schedule or Schedule("message-driven", DEFAULT_SLACK, "alternate")
    rows: list[Row] = []
    rejected: list[Rejection] = []
    for stages in g_inter or [n for n in range(1, gpus + 1) if gpus % n == 0]:
        if gpus % stages:
            rejected.append(Rejection(stages, 0, None, f"{stages} does not divide {gpus} devices"))
            continue
        grid = Grid(stages, gpus // stages)
        why = _cannot(workload, grid, global_batch_size)
        if why is not None:
            rejected.append(Rejection(grid.g_inter, grid.g_data, None, why))
            continue
        share = global_batch_size // grid.g_data
        for size in microbatch_sizes or _powers_of_two(share):
            found = _row(workload, cluster, grid, size, share, tried, room, costing)
            if schedule is None and isinstance(found, Rejection):
                least = replace(tried, slack=0)
                found = _row(workload, cluster, grid, size, share, least, room, costing)
            if isinstance(found, Row):
                rows.append(found)
                continue
            rejected.append(found)
            if microbatch_sizes is None:
                break  # larger ones need more
    return rows, rejected


def needs(
    loads: Sequence[StageLoad],
    schedule: Schedule,
    cluster: Cluster,
    microbatch_size: int,
    microbatches: int,
) -> list[StageMemory]:
    """Memory of every stage under a schedule."""
    grid = Grid(len(loads), 1)
    return [
        _stage_needs(stage, load, schedule, cluster, grid, microbatch_size, microbatches)
        for stage, load in enumerate(loads)
    ]


def _stage_needs(
    stage: int,
    load: StageLoad,
    schedule: Schedule,
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
    microbatches: int,
) -> StageMemory:
    return stage_memory(
        load,
        microbatch_size=microbatch_size,
        in_flight=most_in_flight(
            schedule, stage=stage, g_inter=grid.g_inter, microbatches=microbatches
        ),
        overhead=cluster.overhead_bytes,
    )


def slack_curve(cluster: Cluster, row: Row, memory_bytes: float) -> list[SlackPoint]:
    """The step over slack, up to G_inter, as far as the memory goes; delays are the same."""
    points = []
    for slack in range(row.grid.g_inter + 1):
        found = with_slack(cluster, row, slack)
        most = max(stage.total for stage in found.memory)
        if most > memory_bytes:
            break
        points.append(SlackPoint(slack, found.seconds, most))
    return points


def chosen_slack(curve: Sequence[SlackPoint]) -> int:
    """The least slack whose step is within `PAYS` of the shortest."""
    shortest = min(point.seconds for point in curve)
    return next(point.slack for point in curve if point.seconds <= (1 + PAYS) * shortest)


def with_slack(cluster: Cluster, row: Row, slack: int) -> Row:
    """A layout with another slack."""
    schedule = replace(row.schedule, slack=slack)
    run = _played(row.costs, cluster, row.grid, schedule, row.microbatches)
    return replace(
        row,
        schedule=schedule,
        memory=needs(row.loads, schedule, cluster, row.microbatch_size, row.microbatches),
        run=run,
        percent_of_peak=row.percent_of_peak * row.run.seconds / run.seconds,
    )


def _cannot(workload: Workload, grid: Grid, global_batch_size: int) -> str | None:
    """Why a grid cannot run at all."""
    if grid.g_inter > workload.most_stages:
        return f"the model can be cut into {workload.most_stages} stages at most"
    if global_batch_size % grid.g_data:
        return f"{grid.g_data} replicas do not divide a batch of {global_batch_size}"
    return None


def _row(
    workload: Workload,
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
    share: int,
    schedule: Schedule,
    room: float,
    costing: Costing,
) -> Row | Rejection:
    """One layout; `share` is the samples of a replica."""

    def refused(reason: str) -> Rejection:
        return Rejection(grid.g_inter, grid.g_data, microbatch_size, reason)

    if share % microbatch_size:
        return refused(f"microbatches of {microbatch_size} do not divide {share} samples")
    microbatches = share // microbatch_size

    def has_room(stage: int, load: StageLoad) -> bool:
        found = _stage_needs(stage, load, schedule, cluster, grid, microbatch_size, microbatches)
        return found.total <= room

    balanced = workload.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
    assert balanced is not None, "there is no limit"
    memory = needs(balanced, schedule, cluster, microbatch_size, microbatches)
    most, fullest = max((stage.total, number) for number, stage in enumerate(memory))
    loads: Sequence[StageLoad] | None = balanced
    if most > room:
        loads = None
        if sum(load.state.total for load in balanced) <= room * grid.g_inter:
            loads = workload.stages(grid.g_inter, grid.g_data, has_room, microbatches=microbatches)
    if loads is None:
        return refused(f"stage {fullest} needs {needed(most, room)}")
    costs = costing(workload, loads, cluster, grid, microbatch_size)
    run = _played(costs, cluster, grid, schedule, microbatches)
    flops = grid.g_data * share * workload.sample_flops
    peak = grid.size * cluster.peak(workload.precision)
    return Row(
        grid=grid,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        schedule=schedule,
        loads=loads,
        memory=needs(loads, schedule, cluster, microbatch_size, microbatches),
        costs=costs,
        run=run,
        percent_of_peak=100 * flops / (run.seconds * peak),
    )


def _played(
    costs: StepCosts, cluster: Cluster, grid: Grid, schedule: Schedule, microbatches: int
) -> StepRun:
    return simulate_step(
        costs, cluster, grid, schedule, microbatches, most_replicas=PLAYED_REPLICAS
    )


def _powers_of_two(most: int) -> list[int]:
    """Those that divide, smallest first."""
    return [size for size in (2**n for n in range(most.bit_length())) if most % size == 0]
