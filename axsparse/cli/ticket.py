"""`axsparse ticket show`: says what a file of masks holds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, say
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import MissingInputError

if TYPE_CHECKING:
    from axsparse.pruning.ticket.ticket_reader import TicketManifest

SHOW = """\
Check a ticket, and say what it holds.

  axsparse ticket show ticket.safetensors
  axsparse ticket show runs/search --json
"""
SHOW_END = """\
A ticket is a file of masks: which entries of which tensors are kept. A run of the same model
starts from one under any layout:

  axsparse train --config my.yaml --set pruning.ticket=ticket.safetensors
"""


def parser() -> CommandParser:
    """The command line."""
    group = CommandParser(prog="axsparse ticket")
    purpose = "algorithm, model, and sparsity per tensor and total"
    show = group.add_member("show", _show, help=purpose, description=SHOW, epilog=SHOW_END)
    show.add_argument("file", metavar="FILE", type=Path, help="the ticket, or a run with one")
    show.add_argument(
        "--json", action="store_true", help="the whole manifest, with the model's parameters"
    )
    return group


def _of_run(path: Path) -> Path:
    """The ticket that a run directory holds, for the path of one; any other path as it is."""
    from axsparse.pruning.ticket.ticket_reader import TICKET_FILE

    if not path.is_dir():
        return path
    if not (path / TICKET_FILE).is_file():
        raise MissingInputError(
            f"ticket: {path} has no {TICKET_FILE}, which a run writes when it finds its masks "
            "after the first step; masks that are drawn before follow from the settings, and "
            "trainer.save_ticket writes them"
        )
    return path / TICKET_FILE


def _show(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.pruning.ticket.ticket_reader import open_ticket

    manifest = open_ticket(_of_run(arguments.file)).manifest
    say(manifest.text(indent=2) if arguments.json else "\n".join(_lines(manifest)))


def _lines(manifest: TicketManifest) -> Iterator[str]:
    """The printed lines: origin, hashes, then a table of the tensors."""
    yield (
        f"{manifest.algorithm}, step {manifest.step}, seed {manifest.seed}, "
        f"axsparse {manifest.axsparse}"
    )
    yield f"masks {manifest.hash}"
    yield f"model {manifest.model_hash}, {len(manifest.parameters)} parameter tensors"
    yield ""
    rows = [
        (name, " × ".join(map(str, entry.shape)), entry.numel, entry.kept, entry.sparsity)
        for name, entry in manifest.tensors.items()
    ]
    rows.append(("total", "", manifest.numel, manifest.kept, manifest.sparsity))
    yield from table(
        {
            "tensor": name,
            "shape": shape,
            "entries": f"{numel:,}",
            "kept": f"{kept:,}",
            "sparsity": f"{100 * sparsity:.3f} %",
        }
        for name, shape, numel, kept, sparsity in rows
    )
