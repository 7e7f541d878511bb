"""Chooses the message-driven schedule of a layout by simulation: how backwards are made, how many
microbatches are in flight, and how much may wait for its weight gradients.

Slack, split backwards and a larger bound each take memory to save time. An option is taken if it
saves at least 1 % of the step for each 3 % of memory that it costs, and never if the fullest rank
would then need more than 85 % of what it may take: see `Trade`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.layout import Layout, LayoutQuestion, Row, with_schedule

PAYS = 0.005
"""The part of a step that an option has to save, even if it costs no memory."""
SAVED_FOR_MEMORY = 1 / 3
"""The part of a step that an option has to save, over the part of memory that it costs."""
MOST_ROOM = 0.85
"""The part of what a rank may take beyond which no option is taken: plans are estimates, and a
machine that is nearly full is slow."""


@dataclass(frozen=True)
class Trade:
    """What an option costs and brings, over the same layout without it."""

    name: str
    """The option, such as "split backwards"."""
    memory: float
    """How much more the fullest rank needs: 0.27 is 27 % more."""
    seconds: float
    """How much longer a step takes: −0.07 is 7 % shorter."""
    fits: bool
    """Whether the fullest rank then needs at most `MOST_ROOM` of what it may take."""

    @property
    def is_taken(self) -> bool:
        """Whether the option is worth its memory."""
        return self.fits and -self.seconds >= max(PAYS, SAVED_FOR_MEMORY * self.memory)

    def __str__(self) -> str:
        verdict = "taken" if self.is_taken else "not taken"
        if not self.fits:
            verdict += f", as more than {100 * MOST_ROOM:.0f} % of the memory would be full"
        memory, seconds = _percent(self.memory), _percent(self.seconds)
        return f"{self.name}: {memory} memory for {seconds} time: {verdict}"


def _percent(part: float) -> str:
    return f"{100 * part:+.0f} %".replace("-", "−")


@dataclass(frozen=True)
class Search:
    """A layout with the schedule that pays, and the same layout with other schedules."""

    row: Row
    slack_curve: Sequence[Row] = ()
    """Each slack that fits, with the row's kind of backward and all simulated with the same
    delays."""
    tried: Sequence[Row] = ()
    """Whole backwards with the slack that pays, and split ones with each bound that was tried."""
    trades: Sequence[Trade] = ()
    """What slack and split backwards cost and bring."""


def with_schedule_that_pays(question: LayoutQuestion, row: Row) -> Search:
    """A message-driven layout with the kind of backward, the slack and the bound that pay.

    Everything is simulated with the same delays, as far as the memory goes. Backwards that nothing
    is gained by splitting are split only if the question says so.
    """
    must_split = question.split_backward is True
    curve = _slacks(question, row, is_split=must_split)
    if not curve:
        return Search(row)
    best = worth_its_memory(question, curve)
    trades = [_of_slack(question, curve, best)] if len(curve) > 1 else []
    tried = [best]
    if must_split or may_split(question, row.layout):
        split_curve = curve if must_split else _slacks(question, row, is_split=True)
        split = split_curve and worth_its_memory(question, split_curve)
        if split:
            bounds = _bounds(question, split)
            tried = [*([] if must_split else [best]), *bounds]
            whole, best = best, worth_its_memory(question, [best, *bounds])
            if not must_split:
                shown = best if best is not whole else bounds[0]
                trades.append(trade(question, "split backwards", whole, shown))
                curve = split_curve if best is not whole else curve
    return Search(best, curve, tried, trades)


def trade(question: LayoutQuestion, name: str, without: Row, option: Row) -> Trade:
    """What an option of a schedule costs and brings."""
    return Trade(
        name,
        memory=option.most_bytes / without.most_bytes - 1,
        seconds=option.seconds / without.seconds - 1,
        fits=option.most_bytes <= MOST_ROOM * question.room,
    )


def worth_its_memory(question: LayoutQuestion, rows: Sequence[Row]) -> Row:
    """The last of the rows, by rising memory, that is taken over the one taken before it.

    The first row is the one without any option.
    """
    best, *options = rows
    for option in sorted(options, key=lambda row: row.most_bytes):
        if trade(question, "", best, option).is_taken:
            best = option
    return best


def faster_split(question: LayoutQuestion, row: Row) -> Row:
    """The same layout with split backwards, if these are allowed, fit and pay; else unchanged."""
    if not may_split(question, row.layout):
        return row
    return worth_its_memory(question, [row, split_row(question, row)])


def split_row(question: LayoutQuestion, row: Row) -> Row:
    """The same layout with split backwards."""
    schedule = replace(row.layout.schedule, split_backward=True)
    return with_schedule(question.cluster, row, schedule)


def may_split(question: LayoutQuestion, layout: Layout) -> bool:
    """Whether stages wait for each other, weight gradients are large enough to fill that time, and
    the question leaves open whether they do."""
    waits = 1 not in (layout.grid.g_inter, layout.microbatches)
    # Each member multiplies with its part of a matrix.
    is_large = layout.microbatch_size >= layout.grid.g_tensor * question.least_split_samples
    return question.split_backward is None and waits and is_large


def _slacks(question: LayoutQuestion, row: Row, *, is_split: bool) -> list[Row]:
    """The layout with each slack up to G_inter, as far as the memory goes."""
    schedule = replace(row.layout.schedule, split_backward=is_split)
    slacks = range(row.layout.grid.g_inter + 1)
    return _that_fit(question, row, (replace(schedule, slack=slack) for slack in slacks))


def _bounds(question: LayoutQuestion, row: Row) -> list[Row]:
    """A split layout, and the same with more memory for weight gradients that wait."""
    grid, schedule = row.layout.grid, row.layout.schedule
    least = max(schedule.bounds(stage, grid.g_inter).held for stage in range(grid.g_inter))
    more = (-(-grid.g_inter // 2), grid.g_inter)
    wider = (replace(schedule, held=float(math.ceil(least) + each)) for each in more)
    return [row, *_that_fit(question, row, wider)]


def _that_fit(question: LayoutQuestion, row: Row, schedules: Iterable[Schedule]) -> list[Row]:
    """The layout under these schedules, of rising memory, up to the first that does not fit."""
    rows = []
    for schedule in schedules:
        option = with_schedule(question.cluster, row, schedule)
        if option.most_bytes > question.room:
            break
        rows.append(option)
    return rows


def _of_slack(question: LayoutQuestion, curve: Sequence[Row], best: Row) -> Trade:
    """The trade of the slack that is taken, or of the least slack if none is."""
    shown = best if best is not curve[0] else curve[1]
    return trade(question, f"slack {shown.layout.schedule.slack}", curve[0], shown)
