"""`axsparse ticket show`: checks a ticket file and prints what it holds."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from axsparse.cli.parser import CommandParser, arguments_of, run_command, say

if TYPE_CHECKING:
    from axsparse.pruning.ticket.ticket_manifest import TicketManifest

USAGE = """\
usage: axsparse ticket show FILE [--json]

  show    algorithm, model, and sparsity per tensor and total (axsparse ticket show --help)
"""
DESCRIPTION = """\
Check a ticket, and say what it holds.

  axsparse ticket show ticket.safetensors
  axsparse ticket show ticket.safetensors --json
"""
EPILOG = """\
A ticket is a file of masks: which entries of which tensors are kept. A run of the same model
starts from one under any layout:

  axsparse train --config my.yaml --set pruning.ticket=ticket.safetensors

exit codes:
  0 done   65 no ticket, or damaged   66 it cannot be read   78 arguments that cannot be run
"""


def parser() -> CommandParser:
    """The command line of `show`."""
    arguments = CommandParser(
        prog="axsparse ticket show",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    arguments.add_argument("file", metavar="FILE", type=Path, help="the ticket")
    arguments.add_argument(
        "--json", action="store_true", help="the whole manifest, with the model's parameters"
    )
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Show a ticket, and end the process with its exit code; one of many ranks works."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_command(lambda: _show(parser().parse_args(arguments_of("ticket", "show", USAGE, argv))))


def _show(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.pruning.ticket.ticket_reader import open_ticket

    manifest = open_ticket(arguments.file).manifest
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
    rows = [("tensor", "shape", "entries", "kept", "sparsity")]
    for name, entry in manifest.tensors.items():
        shape = " × ".join(map(str, entry.shape))
        rows.append((name, shape, *_figures(entry.numel, entry.kept, entry.sparsity)))
    rows.append(("total", "", *_figures(manifest.numel, manifest.kept, manifest.sparsity)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *cells])


def _figures(numel: int, kept: int, sparsity: float) -> tuple[str, str, str]:
    return f"{numel:,}", f"{kept:,}", f"{100 * sparsity:.3f} %"
