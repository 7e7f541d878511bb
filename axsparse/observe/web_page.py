"""What all HTML pages share: their frame, tables, legends and colours.

A page is one file that loads nothing from elsewhere; charts are inline SVG (`observe.charts`).
It is readable in light and in dark, and 400 pixels wide. Neighbours differ in lightness, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

PHASE_COLOURS: Mapping[str, str] = {
    "data": "#1f6f8b",
    "compute": "#5aa9e6",
    "compress": "#9c4f12",
    "optimizer": "#f2b134",
    "p2p": "#7b3fa0",
    "bubble": "#c9ccd1",
    "collective": "#2e7d4f",
    "other": "#d98cb3",
}
"""The colours of the phases of `observe.phases`, in its order."""
SERIES_COLOURS = (
    *("#3178c6", "#e8a050", "#8a4fb0", "#4fbf90", "#b8433f", "#d0b040"),
    *("#2f7f5f", "#d98cb3", "#7a5230", "#8fb8e8", "#6b6b6b", "#c0d060"),
)
"""The colours of curves: each stands for one run."""
PICTURE_STYLE = """
svg { font-family: system-ui, sans-serif; stroke-linejoin: round; display: block;
  margin: .3em 0 1.2em; max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
.wide svg { max-width: none; }
.key { display: inline-block; max-width: 100%; margin-right: 1em; overflow-wrap: anywhere; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
"""
"""Of pictures and their legends; pages of others that show them need it, too."""
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #ddd; --soft: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181d; --rule: #3a3d44; --soft: #a2a6ad; }
}
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1em; max-width: 1240px;
  color: var(--ink); background: var(--paper); }
.charts { display: grid; gap: 0 1.5em;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
.charts > figure { min-width: 0; }
figcaption { font-weight: 600; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-variant-numeric: tabular-nums; }
td, th { padding: .15em .5em; text-align: right; border-bottom: 1px solid var(--rule); }
td:first-child, th:first-child { text-align: left; }
h1, h2, h3, li, p, td { overflow-wrap: anywhere; }
.wide td { overflow-wrap: normal; white-space: nowrap; }
.wide td.long { white-space: normal; overflow-wrap: anywhere; min-width: 16em; }
.many::before { content: "scrolls sideways →"; color: var(--soft); position: sticky; left: 0;
  display: none; }
@media (max-width: 700px) { .many::before { display: inline-block; } }
.note, .flat, summary { color: var(--soft); }
.flat { grid-column: 1 / -1; margin: .2em 0; }
figure { margin: 0; }
pre { overflow-x: auto; }
"""
MANY = 5
"""Columns of a table that is wider than a telephone, and says that it scrolls."""
LONG = 32
"""Letters from which on the text of a cell is broken into lines."""


def page(title: str, lines: Iterable[str], generator: str) -> str:
    """The text of a page; `lines` are HTML, and `generator` names the command that writes it."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta name="generator" content="{escape(generator)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{PICTURE_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *lines,
            "</body></html>",
            "",
        ]
    )


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table that scrolls sideways where the page is narrow; all texts are escaped here."""
    yield f'<div class="wide{" many" if len(heads) >= MANY else ""}" tabindex="0"><table><tr>'
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(map(_cell, row)) + "</tr>"
    yield "</table></div>"


def _cell(text: str) -> str:
    long = ' class="long"' if len(text) >= LONG else ""
    return f"<td{long}>{escape(text)}</td>"


def legend(colours: Mapping[str, str]) -> str:
    """The names of series beside their colours, in the order of the mapping."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f"<div>{''.join(keys)}</div>"
