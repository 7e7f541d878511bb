"""The memory of stages by category, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from axsparse.observe.charts import WIDE, Bars
from axsparse.planner.stage_memory import StageMemory
from axsparse.runtime.console import format_bytes

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
    title: str, rows: Sequence[tuple[str, StageMemory]], line: float, line_name: str
) -> Bars:
    """A bar for each of the rows, which have a name each, and a line at `line` bytes."""
    there = {name for _, memory in rows for name, value in asdict(memory).items() if value}
    key = {name: colour for name, colour in MEMORY_COLOURS.items() if name in there}
    bars = [
        (name, [getattr(memory, part) for part in key], format_bytes(memory.total))
        for name, memory in rows
    ]
    mark = (line, f"{line_name} {format_bytes(line)}")
    return Bars(title, bars, list(key.values()), key, mark, WIDE)
