"""The table of all commands, and their command lines: for the help and the pages."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from axsparse.cli.parser import CommandParser


class Command(NamedTuple):
    """A command: its module has `parser`, and `main` if all ranks of a launcher carry it out."""

    module: str
    purpose: str


COMMANDS = {
    "train": Command("axsparse.train", "train what a configuration file describes"),
    "config": Command("axsparse.cli.config", "show every setting and where it comes from"),
    "plan": Command("axsparse.cli.plan", "find a layout, its memory and its time, without a GPU"),
    "report": Command("axsparse.cli.report", "draw runs as a page for a browser"),
    "compare": Command("axsparse.cli.compare", "say whether two runs are the same, bit by bit"),
    "data": Command("axsparse.cli.data", "turn text files into tokens"),
    "mask": Command("axsparse.cli.mask", "say what a mask file holds"),
    "prune": Command("axsparse.cli.prune", "prune and heal a model, or say what a run would prune"),
    "checkpoint": Command("axsparse.cli.checkpoint", "look at what a run saved"),
    "generate": Command("axsparse.cli.generate", "continue a text with a trained model"),
    "evaluate": Command("axsparse.cli.evaluate", "measure a trained model on validation data"),
    "export": Command("axsparse.cli.export", "write what was trained for other libraries"),
    "submit": Command("axsparse.cli.submit", "fill in a job script for SLURM, LSF, PBS or Flux"),
    "bundle": Command("axsparse.cli.bundle", "gather wheels for where there is no network"),
    "doctor": Command("axsparse.cli.doctor", "check whether this machine is fit for training"),
}


def all_parsers() -> dict[str, CommandParser]:
    """The command line of every command, by the words after `axsparse`; none loads torch."""
    parsers: dict[str, CommandParser] = {}
    for word, command in COMMANDS.items():
        parser = import_module(command.module).parser()
        under = {f"{word} {name}": subparser for name, subparser in parser.subcommands.items()}
        parsers.update(under or {word: parser})
    return parsers
