"""The result as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write_report(result: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write both and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = (folder / f"{name}{suffix}" for suffix in (".json", ".md"))
    data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(result), encoding="utf-8")
    return [data, page]


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    machine = result["machine"]
    lines = [
        "# axsparse beside its peers",
        "",
        "; ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        result["note"],
        "",
    ]
    for part in result.get("times", []):
        lines += _times(part)
    if result.get("cap"):
        lines += _cap(result["cap"])
    return "\n".join(lines).rstrip() + "\n"


def _times(part: Row) -> list[str]:
    title = f"## {part['size']}, {part['precision']}"
    head = (
        f"{part['parameters'] / 1e6:.1f} M parameters, of which SAMO keeps "
        f"{part['kept'] / part['parameters']:.2f}; {part['rounds']} rounds of {part['steps']} steps"
    )
    rows = []
    for row in part["rows"]:
        name = _name(row)
        if "does not count" in row:
            rows.append([name, row["layout"], f"does not count: {row['does not count']}"])
            continue
        rows.append(
            [
                name,
                row["layout"],
                _text(row["milliseconds"], 0),
                _text(row["to_plain"]),
                _text(row["to_dense_peer_of_layout"]),
                row["losses_agree_to"] or "(none)",
                f"{row['cpu_seconds_a_step']:.2f}",
                "/".join(f"{value:.0f}" for value in row["peak_megabytes_above_libraries"]),
                f"{row['foreign_share']:.0%}",
            ]
        )
    titles = [
        *("contender", "stages × replicas", "ms a step", "to plain", "to dense peer"),
        *("digits of losses", "CPU s a step", "peak MB a rank", "others took"),
    ]
    faster = [
        [
            f"{r['ours']} over {_name({'contender': r['peer'], 'variant': r['setting']})}",
            r["layout"].replace("x", " × "),
            _text(r["times_as_fast"]),
        ]
        for r in part["speedups"]
    ]
    return [
        *(title, "", head, "", *_table(titles, rows), ""),
        *_table(["times as fast", "stages × replicas", "ratio"], faster),
        "",
    ]


def _cap(part: Row) -> list[str]:
    head = (
        f"{part['model']}, {part['parameters'] / 1e6:.0f} M parameters, {part['precision']}; each "
        f"rank may take {part['budget_megabytes']} MB beyond its libraries."
    )
    tried = [
        [
            _name(row),
            row["layout"],
            f"{row['steps_a_second']:.3f} steps/s" if row["ran"] else row["why"],
        ]
        for row in part["tried"]
    ]
    best = [
        [
            _name(row),
            row["layout"],
            row.get("does not count") or f"{row['steps_a_second']:.3f}",
            _text(row.get("samo_is_times_as_fast")),
        ]
        for row in part["best"]
    ]
    titles = ["contender", "stages × replicas"]
    return [
        *("## Under one memory cap", "", head, ""),
        *_table([*titles, "steps a second, best layout", "SAMO is times as fast"], best),
        *("", "All that was tried:", "", *_table([*titles, "result"], tried), ""),
    ]


def _name(row: Row) -> str:
    return f"{row['contender']} ({row['variant']})" if row["variant"] else row["contender"]


def _text(figure: Row | None, digits: int = 2) -> str:
    if figure is None:
        return ""
    middle, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "least", "most"))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; short rows are filled up."""
    full = [[*row, *[""] * (len(titles) - len(row))] for row in rows]
    return [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in full),
    ]
