"""The least memory and the fewest devices that do, for a model that fits in no layout."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache

from axsparse.config.section import counted
from axsparse.planner.layout_search import Layout, Rejection, SearchRequest, split_layers
from axsparse.planner.stage_memory import StageLoad
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

RECOMPUTED = ", recomputing activations"


class DoesNotFitError(ConfigError):
    """No layout fits the memory of the devices; the message says what memory or devices would."""

    def __init__(
        self,
        request: SearchRequest,
        rejected: Sequence[Rejection],
        least_bytes: float,
        fewest: int | None,
    ) -> None:
        """`least_bytes` is the memory of a device with which a plan finds a layout, rounded up as
        it is shown; `fewest` are the fewest devices of this memory that would do, None if no number
        does, or if the number of replicas is given, so that no others were tried."""
        said = f"does not fit: {counted(request.gpus, 'device')} would do with "
        said += f"{short(least_bytes)} GB"
        if fewest is not None:
            said += f", {fewest} with {short(request.rank_budget)}"
        super().__init__(said + RECOMPUTED * request.model.recomputes)
        self.request, self.rejected = request, rejected
        self.least_bytes, self.fewest = least_bytes, fewest


def least_memory(request: SearchRequest) -> float | None:
    """The bytes that each device of the request needs; None if they have no layout."""
    layouts = list(_layouts(request, request.gpus))
    if not layouts:
        return None

    def fits(rank_budget: float) -> bool:
        return any(_loads(request, layout, rank_budget) is not None for layout in layouts)

    overhead = request.cluster.overhead_bytes
    enough = min(
        max(stage.total for stage in layout.memory(loads, overhead))
        for layout in layouts
        if (loads := _loads(request, layout, math.inf)) is not None
    )
    # Two digits are shown, and gigabytes without fractions.
    unit = min(1e9, 10.0 ** (math.floor(math.log10(enough)) - 1))
    units = range(1, math.ceil(enough / unit))
    return unit * (1 + bisect_left(units, True, key=lambda number: fits(number * unit)))


def fewest_devices(request: SearchRequest) -> int | None:
    """The fewest devices of this memory that fit the model, more than the request has; None if no
    number does."""

    @cache
    def layout_fits(layout: Layout) -> bool:
        return _loads(request, layout, request.rank_budget) is not None

    def fits(gpus: int) -> bool:
        return any(map(layout_fits, _layouts(request, gpus)))

    stages = max(request.g_inter or [request.model.most_stages])
    # Each replica takes a microbatch at least.
    microbatches = request.microbatches(min(request.microbatch_sizes or [1]))
    most = stages * request.g_tensor * microbatches
    if not fits(most):
        return None
    # Stages have to divide the devices, so that fewer may do than are found first.
    enough = 1 + bisect_left(range(1, most), True, key=fits)
    return next(n for n in range(request.gpus + 1, enough + 1) if n == enough or fits(n))


def short(nbytes: float) -> str:
    """Gigabytes without zeros at the end: "40", "17.18"."""
    return f"{nbytes / 1e9:.4g}"


def _layouts(request: SearchRequest, gpus: int) -> Iterator[Layout]:
    """The layouts of `gpus` devices, each under the schedule and at the microbatch size that need
    least memory; the ones of most stages first."""
    batch = request.global_batch_size
    size = min(request.microbatch_sizes or [1])
    microbatches = request.microbatches(size)
    schedule = request.schedules[-1]  # the one of fewest microbatches in flight
    of_stages, left = divmod(gpus, request.g_tensor)
    if left or size > batch:
        return
    most = request.model.most_stages
    for stages in request.g_inter or range(min(of_stages, most), 0, -1):
        replicas, left = divmod(of_stages, stages)
        if stages <= most and not left and 0 < replicas <= microbatches:
            grid = Grid(stages, replicas, request.g_tensor)
            yield Layout(grid, schedule, size, -(-microbatches // replicas))


def _loads(
    request: SearchRequest, layout: Layout, rank_budget: float
) -> Sequence[StageLoad] | None:
    model = request.model.tp_shard(layout.grid.g_tensor)
    found = split_layers(model, layout, request.cluster.overhead_bytes, rank_budget)
    return None if isinstance(found, Rejection) else found
