"""Draws the spans of a step as a timeline, a row for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby

from axsparse.observe.trace_file import Span
from axsparse.observe.web_page import LETTER, PHASE_COLOURS, legend, svg, text

WIDTH, LEFT = 960, 90
HEIGHT = 18
"""Of a row, in pixels."""


def timeline(spans: Sequence[Span], length: float, unit: str = " s") -> Iterator[str]:
    """The spans of one replica, of which the step begins at 0 and takes `length` of a unit."""
    seen = {span.phase for span in spans}
    stages = 1 + max(span.stage for span in spans)
    yield legend({name: colour for name, colour in PHASE_COLOURS.items() if name in seen})
    yield f'<div class="wide">{svg(WIDTH, HEIGHT * stages + 20)}'
    for stage in range(stages):
        yield text(4, HEIGHT * stage + 13, f"stage {stage}")
    scale = (WIDTH - LEFT - 10) / length
    for span in spans:
        width = max(0.3, scale * (span.end - span.begin))
        told = f"{span.name} ({span.phase}) {1e3 * (span.end - span.begin):.3g} ms"
        yield (
            f'<rect x="{LEFT + scale * span.begin:.2f}" y="{HEIGHT * span.stage + 1}" '
            f'width="{width:.2f}" height="{HEIGHT - 2}" fill="{PHASE_COLOURS[span.phase]}">'
            f"<title>{escape(told)}</title></rect>"
        )
        if span.phase == "compute" and width > LETTER * len(span.name) + 6:
            x = LEFT + scale * span.begin + 3
            yield text(x, HEIGHT * span.stage + 13, span.name, fill="#111")
    yield text(LEFT, HEIGHT * stages + 14, "0")
    yield text(WIDTH - 10, HEIGHT * stages + 14, f"{length:.3g}{unit}", anchor="end")
    yield "</svg></div>"


def joined(spans: Sequence[Span], most: int) -> list[Span]:
    """At most about `most` spans that look the same: neighbours too short to be seen are one.

    A joined span has the phase that takes most of it. `spans` are those of one step and replica.
    """
    stages: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.stage, span.begin)):
        stages.setdefault(span.stage, []).append(span)
    if not stages or len(spans) <= most:
        return [span for own in stages.values() for span in own]
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    shortest = 2 * length * len(stages) / most
    return [whole for own in stages.values() for whole in _of_stage(own, shortest)]


def _of_stage(own: Sequence[Span], shortest: float) -> Iterator[Span]:
    """The spans of one stage in order of time; those shorter than `shortest` are joined."""
    first = own[0].begin

    def cell(numbered: tuple[int, Span]) -> tuple[int, int]:
        """Equal for spans that are joined: short ones that begin in the same stretch of time."""
        number, span = numbered
        is_long = span.end - span.begin >= shortest
        return (number, 1) if is_long else (int((span.begin - first) / shortest), 0)

    before: Span | None = None
    for _, group in groupby(enumerate(own), cell):
        whole = _one([span for _, span in group])
        if before is not None and (before.phase, before.name) == (whole.phase, whole.name):
            before = replace(before, end=whole.end)
            continue
        if before is not None:
            yield before
        before = whole
    if before is not None:
        yield before


def _one(group: Sequence[Span]) -> Span:
    """One span in place of neighbouring ones."""
    if len(group) == 1:
        return group[0]
    seconds: dict[str, float] = {}
    for span in group:
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.end - span.begin
    phase = max(seconds, key=lambda name: seconds[name])
    names = {span.name for span in group if span.phase == phase}
    name = names.pop() if len(names) == 1 else phase
    return replace(group[0], phase=phase, name=name, end=group[-1].end)
