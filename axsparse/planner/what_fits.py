"""The least memory and the fewest devices that do, for a model that fits in no layout."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial

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
        devices, least = counted(request.gpus, "device"), short(least_bytes)
        more = "" if fewest is None else f", {fewest} with {short(request.rank_budget)}"
        again = RECOMPUTED * request.model.recomputes
        super().__init__(f"does not fit: {devices} would do with {least} GB{more}{again}")
        self.request, self.rejected = request, rejected
        self.least_bytes, self.fewest = least_bytes, fewest


def least_memory(request: SearchRequest) -> float | None:
    """The bytes that each device of the request needs; None if they have no layout."""
    layouts = []
    for stages in _stages(request):
        replicas, left = divmod(request.gpus, stages * request.g_tensor)
        layout = _layout(request, stages, replicas)
        if layout is not None and not left:
            layouts.append(layout)
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
    number does. With more replicas a stage needs no more memory."""
    fewest = None
    most_replicas = request.microbatches(min(request.microbatch_sizes or [1]))

    def fits(stages: int, replicas: int) -> bool:
        layout = _layout(request, stages, replicas)
        return layout is not None and _loads(request, layout, request.rank_budget) is not None

    for stages in _stages(request):
        of_replica = stages * request.g_tensor
        first = request.gpus // of_replica + 1
        last = most_replicas if fewest is None else (fewest - 1) // of_replica
        if first <= last and fits(stages, last):
            found = bisect_left(range(first, last), True, key=partial(fits, stages))
            fewest = of_replica * (first + found)
    return fewest


def short(nbytes: float) -> str:
    """Gigabytes without zeros at the end: "40", "17.18"."""
    return f"{nbytes / 1e9:.4g}"


def _stages(request: SearchRequest) -> Iterable[int]:
    """The numbers of stages that are tried, the most first: a stage of few layers fits earlier."""
    most = request.model.most_stages
    return sorted((n for n in request.g_inter or range(1, most + 1) if n <= most), reverse=True)


def _layout(request: SearchRequest, stages: int, replicas: int) -> Layout | None:
    """A layout under the schedule and at the microbatch size that need least memory; None where a
    replica gets no microbatch."""
    size = min(request.microbatch_sizes or [1])
    microbatches = request.microbatches(size)
    if not 0 < replicas <= microbatches or size > request.global_batch_size:
        return None
    schedule = request.schedules[-1]  # the one of fewest microbatches in flight
    grid = Grid(stages, replicas, request.g_tensor)
    return Layout(grid, schedule, size, -(-microbatches // replicas))


def _loads(
    request: SearchRequest, layout: Layout, rank_budget: float
) -> Sequence[StageLoad] | None:
    model = request.model.tp_shard(layout.grid.g_tensor)
    found = split_layers(model, layout, request.cluster.overhead_bytes, rank_budget)
    return None if isinstance(found, Rejection) else found
