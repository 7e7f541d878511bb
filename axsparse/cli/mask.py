"""`axsparse mask`: shows the contents of a mask file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from axsparse.cli.parser import CommandParser, say

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

    masks = open_masks(arguments.file)
    shapes = {name: entry.shape for name, entry in masks.entries.items()}
    say("\n".join(kept_table(shapes, masks.kept)))


def kept_table(shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int]) -> Iterator[str]:
    """A row of the table for each pruned tensor, and one for all."""
    from axsparse.planner.plan_report import table

    rows = [
        (name, " × ".join(map(str, shape)), math.prod(shape), kept[name])
        for name, shape in shapes.items()
    ]
    rows.append(("total", "", sum(row[2] for row in rows), sum(kept[name] for name in shapes)))
    yield from table(
        {
            "tensor": name,
            "shape": shape,
            "entries": f"{numel:,}",
            "kept": f"{stay:,}",
            "sparsity": f"{100 * (1 - stay / max(numel, 1)):.3f} %",
        }
        for name, shape, numel, stay in rows
    )
