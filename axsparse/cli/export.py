"""`axsparse export`: writes the weights of a checkpoint in formats that other libraries read."""

from __future__ import annotations

import argparse
from pathlib import Path

from axsparse.cli.parser import DATA, CommandParser, add_checkpoint, add_set, is_folder, say
from axsparse.runtime.errors import ConfigError

DESCRIPTION = """\
Write the weights of a checkpoint for other libraries. RUN is a run directory, whose newest
checkpoint is taken, or one checkpoint in it:

  axsparse export runs/my_run --to hf --out my_gpt
  axsparse export runs/my_run --step 500 --to torch --out weights.safetensors
  axsparse export my_pruned_folder --to sparse --out my_sparse_folder

Values are the fp32 master weights. The checkpoint is verified first; its run may still go on.
"""


def parser() -> CommandParser:
    arguments = CommandParser(_export, prog="axsparse export", description=DESCRIPTION)
    add = arguments.add_argument
    add_checkpoint(add)
    add_set(add, DATA)
    text = (
        "hf: a folder that from_pretrained of transformers loads, with the tokenizer of the data; "
        "sparse: such a folder with kept entries in bf16 and one bit an entry, for "
        "ax.load_pruned and axsparse generate (RUN may be a Hugging Face folder then); torch: a "
        "safetensors file of dense tensors, named as axsparse names them"
    )
    add("--to", choices=("hf", "sparse", "torch"), required=True, help=text)
    add("--out", metavar="PATH", type=Path, required=True)
    text = "the weights that training computes with, in its precision, instead of the masters"
    add("--trained", action="store_true", help=text)
    add("--force", action="store_true", help="replace an earlier export")
    return arguments


def _export(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.runtime.console import format_bytes
    from axsparse.training.export import export, export_sparse

    if arguments.to == "sparse" and is_folder(arguments.run):
        if arguments.step is not None or arguments.trained or arguments.overrides:
            raise ConfigError("--step, --trained, --set: a folder is no run; leave them out")
        tensors, nbytes = export_sparse(arguments.run, arguments.out, force=arguments.force)
        say(f"{arguments.out}: {tensors} tensors, {format_bytes(nbytes)}, of {arguments.run}")
        return
    how = {"step": arguments.step, "trained": arguments.trained, "force": arguments.force}
    how["data"] = arguments.overrides
    done = export(arguments.run, arguments.to, arguments.out, **how)
    say(
        f"{arguments.out}: {done.tensors} tensors, {format_bytes(done.nbytes)}, of "
        f"{done.checkpoint.path} after step {done.checkpoint.step}"
    )
    for note in done.notes:
        say(f"note: {note}")
