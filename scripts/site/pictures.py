"""Pictures of the site, drawn by what axsparse itself computes: its policies, its formulas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from axsparse.observe.charts import (
    PICTURE_STYLE,
    SERIES_COLOURS,
    WIDE,
    Bars,
    Timeline,
    chart_html,
    svg,
)
from axsparse.observe.trace_file import Span
from axsparse.pipeline.policy import Policy, Schedule, ScheduleName
from axsparse.pipeline.simulator import Durations, MessageCost, simulate
from axsparse.runtime.communication import Direction
from axsparse.samo.state_bytes import StateFormat, TensorSize, tensor_bytes

STYLE = f".picture {{{PICTURE_STYLE}}}\n"
"""The styles that the site's pages need in addition to their own."""
NUMEL = 4096 * 4096
STAGES, MICROBATCHES = 4, 8
DECODED = Path(__file__).parents[2] / "benchmarks/results/decode_avx512.json"
SLOW = 3.0
"""How much longer the one slow forward takes."""


def draw(name: str) -> str:
    """A picture as HTML in one line, which Markdown leaves alone."""
    return f'<div class="picture">{"".join(_PICTURES[name]())}</div>'


def _state_bytes() -> Iterator[str]:
    """Bytes a parameter, by category, dense and pruned to a tenth."""
    bars = {
        "dense, as usual": (2.0, 0.0, 6.0, 4.0, 8.0),
        "SAMO, as published": (2.0, 0.4, 0.6, 0.4, 0.8 + 0.2),
        "axsparse": _stored(
            StateFormat(torch.bfloat16, torch.bfloat16, ("exp_avg", "exp_avg_sq"), index="auto")
        ),
    }
    names = ("weight", "index", "gradient", "master", "optimizer")
    rows = [(name, parts, f"{sum(parts):.2f} bytes") for name, parts in bars.items()]
    key = dict(zip(names, SERIES_COLOURS, strict=False))
    title = "Bytes of a parameter"
    yield from chart_html(Bars(title, rows, list(key.values()), key, width=WIDE))


def _stored(form: StateFormat) -> tuple[float, ...]:
    found = tensor_bytes(TensorSize(NUMEL, NUMEL // 10), form)
    parts = (found.weight, found.index, found.gradient, found.master, found.optimizer)
    return tuple(nbytes / NUMEL for nbytes in parts)


def _policy(schedule: Schedule, stage: int) -> Policy:
    return schedule.policy(stage=stage, g_inter=STAGES, microbatches=MICROBATCHES)


def _schedules() -> Iterator[str]:
    """One step under three schedules, with one slow forward on the second stage."""
    names: Sequence[tuple[ScheduleName, str]] = (
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("message-driven", "message-driven, extra_in_flight 1"),
    )
    forward = [[1.0] * MICROBATCHES for _ in range(STAGES)]
    forward[1][2] = SLOW
    backward = [[2.0] * MICROBATCHES for _ in range(STAGES)]
    durations = Durations(forward, backward)
    edges = [MessageCost(latency=0.1)] * (STAGES - 1)
    runs = {}
    for name, title in names:
        schedule = Schedule(name, int(name == "message-driven"))
        runs[title] = simulate(partial(_policy, schedule), durations, edges)
    longest = max(run.seconds for run in runs.values())
    for title, run in runs.items():
        spans = []
        for number, stage in enumerate(run.stages):
            now = 0.0
            for action, begin in zip(stage.actions, stage.begins, strict=True):
                end = begin + durations.of(number, action)
                if begin > now:
                    spans.append(Span(1, 0, number, "bubble", "bubble", now, begin))
                phase = "compute" if action.direction is Direction.FORWARD else "p2p"
                spans.append(Span(1, 0, number, phase, str(action), begin, end))
                now = end
        yield f"<p><strong>{title}</strong>: {run.seconds:.1f} times a forward</p>"
        # The legend of phases does not suit actions; forwards and backwards differ in colour.
        yield f'<div class="wide">{svg(Timeline(title, spans, longest, {}))}</div>'


def _decoding() -> Iterator[str]:
    """Tokens a second and memory of pruned models, as benchmarks/decode.py measured them."""
    found = json.loads(DECODED.read_text(encoding="utf-8"))["models"]
    for name, contenders in found.items():
        batch = int(name.rpartition(" ")[2])
        rows = []
        for contender, row in contenders.items():
            speed = 1e3 * batch / row["ms a token"]["median"]
            label = contender.replace("%", " % zeros")
            rows.append((label, (speed,), f"{speed:.1f} tokens/s, {row['MB']:.0f} MB"))
        yield from chart_html(Bars(f"{name}: tokens a second", rows, SERIES_COLOURS[:1]))


_PICTURES = {"state-bytes": _state_bytes, "schedules": _schedules, "decoding": _decoding}
