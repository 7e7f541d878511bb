"""The least memory and the fewest devices that do, for a model that fits in no layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from axsparse.config.validate import counted
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.baselines import Baseline
from axsparse.planner.layout import Layout, LayoutQuestion
from axsparse.planner.layout_search import Rejection, split_layers, why_not_members
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

RECOMPUTED = ", recomputing activations"
"""The suffix of an answer where activations are recomputed."""


@dataclass(frozen=True)
class Least:
    """The layout that needs least memory of a number of devices."""

    nbytes: float
    """Memory of a device with which a plan finds a layout, rounded up as it is shown."""
    layout: Layout
    loads: Sequence[StageLoad]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why no layout fits, and sufficient memory or devices."""

    method: str
    question: LayoutQuestion
    rejected: Sequence[Rejection]
    least: Least
    fewest: int | None
    """The fewest devices of this memory that would do; None if no number does, or if the number of
    replicas is given, so that no others were tried."""
    recomputes: bool
    """Whether activations are recomputed."""
    baselines: Sequence[Baseline]

    @property
    def answer(self) -> str:
        """The answer in a line."""
        question = self.question
        room = short(question.room)
        said = f"does not fit: {counted(question.gpus, 'device')} would do with "
        said += f"{short(self.least.nbytes)} GB"
        if self.fewest is not None:
            said += f", {self.fewest} with {room}"
        elif question.may_leave:
            said += f"; no number of devices does with {room}"
        return said + RECOMPUTED * self.recomputes


class DoesNotFitError(ConfigError):
    """No layout fits the memory of the devices; the message is the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.answer)
        self.refusal = refusal


def least_memory(question: LayoutQuestion) -> Least | None:
    """The least memory that the devices of the question need; None if they have no layout."""
    layouts = list(_layouts(question, question.gpus))
    if not layouts:
        return None

    def fitting(room: float) -> tuple[Layout, Sequence[StageLoad]] | None:
        tried = ((layout, _loads(question, layout, room)) for layout in layouts)
        return next(((layout, loads) for layout, loads in tried if loads is not None), None)

    overhead = question.cluster.overhead_bytes
    enough = min(
        max(stage.total for stage in layout.memory(loads, overhead))
        for layout in layouts
        if (loads := _loads(question, layout, math.inf)) is not None
    )
    # Two digits are shown, and gigabytes without fractions.
    unit = min(1e9, 10.0 ** (math.floor(math.log10(enough)) - 1))
    least = _first(lambda number: fitting(number * unit) is not None, math.ceil(enough / unit))
    found = fitting(least * unit)
    assert found is not None, "it was tried"
    return Least(least * unit, *found)


def fewest_devices(question: LayoutQuestion) -> int | None:
    """The fewest devices of this memory that fit the model, more than the question has; None if no
    number does."""
    known: dict[Layout, bool] = {}

    def holds(layout: Layout) -> bool:
        if layout not in known:
            known[layout] = _loads(question, layout, question.room) is not None
        return known[layout]

    def fits(gpus: int) -> bool:
        return any(map(holds, _layouts(question, gpus)))

    workload, batch = question.workload, question.global_batch_size
    stages = max(question.g_inter or [workload.most_stages])
    # Each replica takes a sample of a batch at least.
    most = stages * max(question.members) * batch
    if not fits(most):
        return None
    # Tensor-parallel ranks that fit one node need not fit several, so that fewer may do than are
    # found first.
    enough = _first(fits, most)
    return next(n for n in range(question.gpus + 1, enough + 1) if n == enough or fits(n))


def short(nbytes: float) -> str:
    """Gigabytes without zeros at the end: "40", "17.18"."""
    return f"{nbytes / 1e9:.4g}"


def _first(holds: Callable[[int], bool], known: int) -> int:
    """The smallest number from 1 on that a condition holds for, which holds from there on; it holds
    for the known one."""
    fails = 0
    while known - fails > 1:
        middle = (fails + known) // 2
        if holds(middle):
            known = middle
        else:
            fails = middle
    return known


def _layouts(question: LayoutQuestion, gpus: int) -> Iterator[Layout]:
    """The layouts of at most `gpus` devices, each under the schedule and at the microbatch size
    that need least memory; the ones of most stages first."""
    batch = question.global_batch_size
    size = min(question.microbatch_sizes or [1])
    microbatches = -(-batch // size)
    schedule = _least_schedule(question)
    for members in question.members:
        of_stages = gpus // members
        used = replace(question, gpus=of_stages * members)
        if not of_stages or size > batch or why_not_members(used, members) is not None:
            continue
        most = min(of_stages, question.workload.most_stages)
        for stages in question.g_inter or range(most, 0, -1):
            if stages > most:
                continue
            for replicas in _replicas(question, gpus, stages * members, microbatches):
                grid = Grid(stages, replicas, members)
                yield Layout(grid, schedule, size, -(-microbatches // replicas))


def _replicas(question: LayoutQuestion, gpus: int, each: int, microbatches: int) -> Iterator[int]:
    """The numbers of replicas of so many devices `each` that the layout search would try."""
    replicas = gpus // each
    if replicas * each == gpus and replicas <= microbatches:
        yield replicas
    if question.may_leave:
        yield -(-microbatches // -(-microbatches // replicas))


def _least_schedule(question: LayoutQuestion) -> Schedule:
    """The last schedule that the layout search tries, which has fewest microbatches in flight."""
    if question.schedules:
        return question.schedules[-1]
    return Schedule("message-driven", 0, "alternate", question.split_backward is True)


def _loads(question: LayoutQuestion, layout: Layout, room: float) -> Sequence[StageLoad] | None:
    """The stages of a layout if they fit."""
    workload = question.workload.of_member(layout.grid.g_tensor)
    found = split_layers(workload, layout, question.cluster.overhead_bytes, room)
    return None if isinstance(found, Rejection) else found
