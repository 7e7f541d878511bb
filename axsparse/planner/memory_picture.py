"""Draws the memory of stages by category, as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from axsparse.observe.web_page import LETTER, legend, svg, text
from axsparse.planner.stage_memory import StageMemory
from axsparse.runtime.console import format_bytes

WIDTH, HEIGHT = 960, 16
"""Of the picture, and of a row."""
MEMORY_COLOURS = {
    "weight": "#5aa9e6",
    "index": "#1f5f8b",
    "gradient": "#f2b134",
    "master": "#2e7d4f",
    "optimizer": "#e59a8f",
    "activations": "#7b3fa0",
    "working": "#c9a3e0",
    "logits": "#b0413e",
    "temporary": "#d9c46a",
    "checkpoint": "#4f6d6d",
    "overhead": "#b8bcc2",
}
"""The colours of the categories of `StageMemory`, in its order."""


def memory_bars(
    rows: Sequence[tuple[str, StageMemory]], line: float, line_name: str
) -> Iterator[str]:
    """A bar for each of the rows, which have a name each, and a line at `line` bytes."""
    left = 16 + LETTER * max(len(name) for name, _ in rows)
    scale = (WIDTH - left - 80) / max(line, *(memory.total for _, memory in rows))
    there = {name for _, memory in rows for name, value in asdict(memory).items() if value}
    yield legend({name: colour for name, colour in MEMORY_COLOURS.items() if name in there})
    yield f'<div class="wide">{svg(WIDTH, HEIGHT * len(rows) + 20)}'
    for number, (row, memory) in enumerate(rows):
        yield text(4, HEIGHT * number + 12, row)
        x = left
        for name, value in asdict(memory).items():
            told = f"{row}: {name} {format_bytes(value)}"
            yield (
                f'<rect x="{x:.2f}" y="{HEIGHT * number + 1}" width="{scale * value:.2f}" '
                f'height="{HEIGHT - 2}" fill="{MEMORY_COLOURS[name]}">'
                f"<title>{escape(told)}</title></rect>"
            )
            x += scale * value
        total = format_bytes(memory.total)
        yield text(WIDTH - 4, HEIGHT * number + 12, total, anchor="end")
    at, bottom = left + scale * line, HEIGHT * len(rows)
    yield f'<line x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="{bottom}" stroke="currentColor"/>'
    yield text(at, bottom + 14, f"{line_name} {format_bytes(line)}", anchor="end")
    yield "</svg></div>"
