"""`axsparse mask`: shows the contents of a mask file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, say

if TYPE_CHECKING:
    from axsparse.pruning.mask_file import MaskFile

DESCRIPTION = """\
Say which entries a mask file keeps. FILE is a mask file, or a run that has found a mask:

  axsparse mask runs/search

A run of the same model starts from it under any layout:

  axsparse train --config my.yaml --set pruning.mask=runs/search
"""


def parser() -> CommandParser:
    arguments = CommandParser(_mask, prog="axsparse mask", description=DESCRIPTION)
    arguments.add_argument("file", metavar="FILE", type=Path, help="a mask file, or a run")
    return arguments


def _mask(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.pruning.mask_file import open_masks

    say("\n".join(_lines(open_masks(arguments.file))))


def _lines(masks: MaskFile) -> Iterator[str]:
    """A row of the table for each mask, and one for all."""
    from axsparse.planner.plan_report import table

    entries = masks.entries
    total = sum(entry.numel for entry in entries.values()), sum(masks.kept.values())
    rows = [
        (name, " × ".join(map(str, entry.shape)), entry.numel, entry.kept)
        for name, entry in entries.items()
    ]
    yield from table(
        {
            "tensor": name,
            "shape": shape,
            "entries": f"{numel:,}",
            "kept": f"{kept:,}",
            "sparsity": f"{100 * (1 - kept / max(numel, 1)):.3f} %",
        }
        for name, shape, numel, kept in (*rows, ("total", "", *total))
    )
