"""`axsparse ticket show | import | export`: looks at masks, and takes them from and to others."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, add_configuration, say
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import MissingInputError, OutputError, writing
from axsparse.runtime.files.atomic import new_path

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
IMPORT = """\
Make a ticket of dense masks: safetensors or a torch state dict with a tensor of zeros and ones for
each pruned matrix, under our name of it or that of transformers.

  axsparse ticket import masks.safetensors --out ticket.safetensors --config my.yaml
  axsparse ticket import masks.safetensors --out ticket.safetensors --config prune_llama.yaml \\
    --set model.from=my_llama
"""
EXPORT = """\
Write the masks of a ticket as safetensors of dense uint8 tensors, zeros and ones.

  axsparse ticket export ticket.safetensors --out masks.safetensors --names hf
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
    purpose = "a ticket of dense masks that another tool has drawn"
    dense = group.add_member("import", _import, help=purpose, description=IMPORT)
    dense.add_argument("file", metavar="MASKS", type=Path, help="the dense masks")
    dense.add_argument("--out", metavar="FILE", type=Path, required=True, help="the ticket")
    add_configuration(dense.add_argument)
    purpose = "the masks of a ticket as dense tensors of zeros and ones"
    export = group.add_member("export", _export, help=purpose, description=EXPORT)
    export.add_argument("file", metavar="FILE", type=Path, help="the ticket, or a run with one")
    export.add_argument("--out", metavar="MASKS", type=Path, required=True, help="a new file")
    export.add_argument(
        "--names",
        choices=("axsparse", "hf"),
        default="axsparse",
        help="names and shapes of axsparse or of Hugging Face's transformers (default %(default)s)",
    )
    return group


def _import(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.config.load import load_config
    from axsparse.models.start_weights import open_weights
    from axsparse.models.survey import survey
    from axsparse.models.zoo.model_registry import model_without_weights
    from axsparse.pruning.ticket.dense_masks import import_masks

    _refuse_taken(arguments.out)
    loaded = load_config(arguments.config, arguments.overrides)
    surveyed = survey(model_without_weights(loaded))
    manifest = import_masks(open_weights(arguments.file), surveyed, arguments.out)
    say(f"{arguments.out}: {_summary(manifest)}")


def _export(arguments: argparse.Namespace) -> None:
    from axsparse.pruning.ticket.dense_masks import export_masks
    from axsparse.pruning.ticket.ticket_reader import open_ticket

    ticket = open_ticket(_of_run(arguments.file))
    _refuse_taken(arguments.out)
    with (
        writing(f"--out: {arguments.out}", "choose another place"),
        new_path(arguments.out) as unfinished,
    ):
        export_masks(ticket, unfinished, foreign=arguments.names == "hf")
    say(f"{arguments.out}: {_summary(ticket.manifest)}")


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


def _refuse_taken(path: Path) -> None:
    if path.is_symlink() or path.exists():
        raise OutputError(f"--out: {path} is there already; choose another place, or move it away")


def _summary(manifest: TicketManifest) -> str:
    return f"masks of {len(manifest.tensors)} tensors, {100 * manifest.sparsity:.3f} % pruned"


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
