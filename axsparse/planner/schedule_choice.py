"""Chooses the message-driven schedule of a layout by simulation: how backwards are made, how many
microbatches are in flight, and how much may wait for its weight gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.layout import Layout
from axsparse.planner.layout_question import PAYS, LayoutQuestion, Row, with_schedule


@dataclass(frozen=True)
class SlackPoint:
    """What a layout's step takes with one slack."""

    slack: int
    seconds: float
    bytes: float
    """Memory of the fullest stage."""


@dataclass(frozen=True)
class SchedulePoint:
    """What a layout's step takes under one message-driven schedule."""

    schedule: Schedule
    seconds: float
    bytes: float
    """Memory of the fullest stage."""


@dataclass(frozen=True)
class Search:
    """A layout with the schedule that pays, and what others would give (see `Plan`)."""

    row: Row
    slack_curve: Sequence[SlackPoint]
    tried: Sequence[SchedulePoint]


def with_schedule_that_pays(question: LayoutQuestion, row: Row) -> Search:
    """A message-driven layout with the kind of backward, the slack and the bound that pay.

    Everything is simulated with the same delays, as far as the memory goes. Backwards that nothing
    is gained by splitting are split only if the question says so.
    """
    found: list[Search] = []
    if question.split_backward is not True:
        found.append(_with_slack_that_pays(question, row, is_split=False))
    if question.split_backward is True or may_split(question, row.layout):
        try_split = _with_slack_that_pays(question, row, is_split=True)
        if try_split.slack_curve:
            found.append(_with_bound_that_pays(question, try_split))
    tried = [point for search in found for point in search.tried]
    best = found[0]
    if len(found) > 1 and found[1].row.seconds <= (1 - PAYS) * best.row.seconds:
        best = found[1]
    return replace(best, tried=tried)


def chosen_slack(curve: Sequence[SlackPoint]) -> int:
    """The smallest slack whose step is at most `PAYS` longer than the shortest."""
    shortest = min(point.seconds for point in curve)
    return next(point.slack for point in curve if point.seconds <= (1 + PAYS) * shortest)


def _with_slack_that_pays(question: LayoutQuestion, row: Row, *, is_split: bool) -> Search:
    """The step with each slack up to G_inter, as far as the memory goes, and the one that pays."""
    points, rows = [], []
    schedule = replace(row.layout.schedule, split_backward=is_split)
    for slack in range(row.layout.grid.g_inter + 1):
        found = with_schedule(question.cluster, row, replace(schedule, slack=slack))
        if found.most_bytes > question.room:
            break
        points.append(SlackPoint(slack, found.seconds, found.most_bytes))
        rows.append(found)
    if not points:
        return Search(row, [], [])
    best = rows[chosen_slack(points)]
    return Search(best, points, [_point(best)])


def _with_bound_that_pays(question: LayoutQuestion, search: Search) -> Search:
    """A split layout with more memory for weight gradients that wait.

    The least bound is taken whose step is at most `PAYS` longer than the shortest.
    """
    row, tried = search.row, list(search.tried)
    grid, schedule = row.layout.grid, row.layout.schedule
    least = max(schedule.bounds(stage, grid.g_inter).held for stage in range(grid.g_inter))
    best: list[Row] = []
    for more in (0, -(-grid.g_inter // 2), grid.g_inter):
        held = math.ceil(least) + more if more else None
        found = with_schedule(question.cluster, row, replace(schedule, held=held))
        if found.most_bytes > question.room:
            break
        if more:
            tried.append(_point(found))
        best.append(found)
    shortest = min(each.seconds for each in best)
    pays = next(each for each in best if each.seconds <= (1 + PAYS) * shortest)
    return replace(search, row=pays, tried=tried)


def faster_split(question: LayoutQuestion, row: Row) -> Row:
    """The same layout with split backwards, if these are allowed, fit and pay; else unchanged."""
    if not may_split(question, row.layout):
        return row
    split = with_schedule(question.cluster, row, replace(row.layout.schedule, split_backward=True))
    fits = split.most_bytes <= question.room
    return split if fits and split.seconds <= (1 - PAYS) * row.seconds else row


def may_split(question: LayoutQuestion, layout: Layout) -> bool:
    """Whether stages wait for each other, weight gradients are large enough to fill that time, and
    the question leaves open whether they do."""
    waits = 1 not in (layout.grid.g_inter, layout.microbatches)
    is_large = layout.microbatch_size >= question.least_split_samples
    return question.split_backward is None and waits and is_large


def _point(row: Row) -> SchedulePoint:
    return SchedulePoint(row.layout.schedule, row.seconds, row.most_bytes)
