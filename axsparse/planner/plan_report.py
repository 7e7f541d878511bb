"""Reports plans as text and as JSON: layouts, their memory and phases, the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from axsparse.config.section import counted
from axsparse.planner.layout_search import WAYS, Candidate, Plan, Rejection, SearchRequest
from axsparse.planner.stage_memory import gigabytes
from axsparse.planner.step_cost import STEP_PHASES
from axsparse.planner.what_fits import RECOMPUTED, DoesNotFitError, short

MOST_ROWS = 12
MOST_STAGES = 8
"""The memory of this many stages is printed: the first ones, the fullest and the last."""
_LEFT = frozenset(
    {"layout", "weights", "stage", "layers", "method", "backward", "tensor", ""}
    | {"name", "unit", "table", "cluster", "worst row", "a miss by"}
)


def lines(plans: Sequence[Plan], notes: Sequence[str]) -> Iterator[str]:
    for plan in plans:
        yield f"{plan.request.method}: " * (len(plans) > 1) + answer(plan)
    for plan in plans:
        yield ""
        yield from _of_one(plan)
    if len(plans) > 1:
        yield ""
        yield from comparison(plans)
    for note in notes:
        yield f"note: {note}"


def refusal_lines(refusal: DoesNotFitError, notes: Sequence[str]) -> Iterator[str]:
    yield str(refusal)
    yield ""
    yield "rejected, with the work of the stages balanced:"
    yield from rejections(refusal.rejected)
    for note in notes:
        yield f"note: {note}"


def answer(plan: Plan) -> str:
    """The answer in a line: "fits: 2 stages × 2 replicas, 33.1 of 40 GB"."""
    best = plan.recommended
    used, rank_budget = gigabytes(best.most_bytes), short(plan.request.rank_budget)
    recomputed = RECOMPUTED * plan.request.model.recomputes
    stored = f", {WAYS[best.weights]}" if WAYS[best.weights] else ""
    return f"fits: {best.layout.grid}, {used} of {rank_budget} GB{stored}{recomputed}"


def _of_one(plan: Plan) -> Iterator[str]:
    best, request, model = plan.recommended, plan.request, plan.request.model
    yield (
        f"{model.config.name} ({request.method}) in {model.precision} on "
        f"{counted(request.gpus, 'device')} of {request.cluster.name}, "
        f"{gigabytes(request.rank_budget)} GB each"
    )
    yield ""
    yield from table([cells(plan, row) for row in plan.rows[:MOST_ROWS]])
    if len(plan.rows) > MOST_ROWS:
        yield f"… and {len(plan.rows) - MOST_ROWS} more (--json has all)"
    yield ""
    layout = best.layout
    yield f"recommended: {layout.grid}, microbatches of {layout.microbatch_size}, {settings(plan)}"
    yield f"because {because(plan)}"
    yield ""
    yield "memory of each stage, GB:"
    shown = set(range(len(best.memory)))
    if len(shown) > MOST_STAGES:
        shown = {*range(MOST_STAGES - 2), best.fullest, len(best.memory) - 1}
    yield from table(
        {
            "stage": str(stage),
            "layers": best.loads[stage].layers,
            **{name: f"{value / 1e9:.3g}" for name, value in asdict(best.memory[stage]).items()},
            "total": f"{best.memory[stage].total / 1e9:.3g}",
        }
        for stage in sorted(shown)
    )
    if layout.grid.g_tensor > 1:
        sent = gigabytes(max(best.sum_bytes))
        yield f"a tensor-parallel rank sends up to {sent} GB to its group in a step"
    if plan.rejected:
        yield ""
        yield "rejected:"
        yield from rejections(plan.rejected)
    yield ""


def settings(plan: Plan) -> str:
    """The options that make training take the recommended layout."""
    layout = plan.recommended.layout
    schedule, grid = layout.schedule, layout.grid
    keys: dict[str, object] = {
        **plan.taken,
        "layout.g_inter": grid.g_inter,
        **({"layout.g_tensor": grid.g_tensor} if grid.g_tensor > 1 else {}),
        "batch.microbatch_size": layout.microbatch_size,
        "pipeline.extra_in_flight": schedule.extra_in_flight,
        "pipeline.split_backward": str(schedule.split_backward).lower(),
    }
    return " ".join(f"--set {key}={value}" for key, value in keys.items())


def because(plan: Plan) -> str:
    best = plan.recommended
    smaller = [each for each in plan.rejected if each.g_inter < best.layout.grid.g_inter]
    if smaller:
        last = max(smaller, key=lambda each: each.g_inter)
        reason = f"fewer stages do not do (with {last.g_inter}: {last.reason})"
    else:
        used, rank_budget = gigabytes(best.most_bytes), gigabytes(plan.request.rank_budget)
        reason = f"the fewest stages fit: {used} GB of {rank_budget} GB"
    fastest = min(plan.rows, key=lambda row: row.seconds)
    if fastest.seconds < best.seconds:
        reason += (
            f"; {fastest.layout.grid} with microbatches of {fastest.layout.microbatch_size} are "
            f"predicted {-100 * plan.margin(fastest):.1f} % faster"
        )
    return reason


def comparison(plans: Sequence[Plan]) -> Iterator[str]:
    first = plans[0].recommended.seconds
    yield from table(
        [
            {
                "method": plan.request.method,
                **cells(plan, plan.recommended),
                "reduction %": f"{100 * (1 - plan.recommended.seconds / first):.1f}",
            }
            for plan in plans
        ]
    )


def scaling(plans: Sequence[Plan]) -> Iterator[str]:
    """The recommended layout for each number of devices.

    Efficiency is relative to the method's smallest number of devices.
    """
    base: dict[str, float] = {}
    rows = []
    for plan in plans:
        method, gpus = plan.request.method, plan.request.gpus
        spent = plan.recommended.seconds * gpus
        least = base.setdefault(method, spent)
        rows.append(
            {
                "method": method,
                "devices": str(gpus),
                **cells(plan, plan.recommended),
                "efficiency %": f"{100 * least / spent:.0f}",
            }
        )
    yield from table(rows)


def rejections(found: Sequence[Rejection]) -> Iterator[str]:
    """One line for each rejected layout; successive ones with the same reason share a line."""
    for reason, alike in groupby(found, lambda each: each.reason):
        first, *others = alike
        stages = ", ".join(str(each.g_inter) for each in (first, *others))
        size = first.microbatch_size
        sizes = "" if size is None else f", microbatches of {size}"
        plural = "" if stages == "1" else "s"
        yield f"  {stages} stage{plural}{sizes}: {reason}"


def table(cells_of: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Aligned columns under the keys of the first row."""
    rows = list(cells_of)
    heads = list(rows[0])
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}

    def line(row: Mapping[str, str]) -> str:
        aligned = (
            row[head].ljust(widths[head]) if head in _LEFT else row[head].rjust(widths[head])
            for head in heads
        )
        return "  ".join(aligned).rstrip()

    yield line({head: head for head in heads})
    yield from map(line, rows)


def cells(plan: Plan, row: Candidate) -> dict[str, str]:
    """The figures of a layout as texts, by the heads of their columns; its phases come last."""
    phases = row.run.mean_phases
    grid = row.layout.grid
    g_tensor = f" × {grid.g_tensor}" * (grid.g_tensor > 1)
    has_ways = any(each.weights != "dense" for each in plan.rows)  # by choice of the plan
    return {
        "layout": f"{grid.g_inter}{g_tensor} × {grid.g_data}",
        **({"weights": row.weights} if has_ways else {}),
        "microbatches": f"{row.layout.microbatches} × {row.layout.microbatch_size}",
        "backward": "split" if row.layout.schedule.split_backward else "whole",
        "extra_in_flight": str(row.layout.schedule.extra_in_flight),
        "GB": gigabytes(row.most_bytes),
        "step s": f"{row.seconds:.4g}",
        "margin %": f"{100 * plan.margin(row):+.1f}",
        "peak %": f"{row.percent_of_peak:.1f}",
        **{name: f"{phases[name]:.3g}" for name in STEP_PHASES},
    }


def as_json(plan: Plan) -> dict[str, Any]:
    cluster = plan.request.cluster
    return {
        "answer": answer(plan),
        **_request_json(plan.request, plan.rejected),
        "taken": dict(plan.taken),
        "because": because(plan),
        "rows": [_row_json(plan, row) for row in plan.rows],
        "constants": {
            name: {"value": getattr(cluster, name), **asdict(origin)}
            for name, origin in cluster.origins.items()
        },
    }


def refusal_json(refusal: DoesNotFitError) -> dict[str, Any]:
    return {
        "answer": str(refusal),
        **_request_json(refusal.request, refusal.rejected),
        "least_bytes": refusal.least_bytes,
        "fewest_devices": refusal.fewest,
    }


def _request_json(request: SearchRequest, rejected: Sequence[Rejection]) -> dict[str, Any]:
    return {
        "method": request.method,
        "model": request.model.config.name,
        "precision": request.model.precision,
        "cluster": request.cluster.name,
        "gpus": request.gpus,
        "memory_bytes": request.rank_budget,
        "recomputes": request.model.recomputes,
        "rejected": list(map(asdict, rejected)),
    }


def _row_json(plan: Plan, row: Candidate) -> dict[str, Any]:
    grid = row.layout.grid
    return {
        **asdict(grid),
        "microbatch_size": row.layout.microbatch_size,
        "microbatches": row.layout.microbatches,
        "schedule": asdict(row.layout.schedule),
        "step_seconds": row.seconds,
        "margin": plan.margin(row),
        "percent_of_peak": row.percent_of_peak,
        "phases": row.run.mean_phases,
        "stages": [
            {
                "layers": load.layers,
                "sum_bytes": row.layout.sum_bytes(load),
                "memory": {**asdict(memory), "total": memory.total},
                "phases": phases,
            }
            for load, memory, phases in zip(row.loads, row.memory, row.run.phases, strict=True)
        ],
    }
