"""`axsparse COMMAND …`: the table of all commands, and the hand-over to one of them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple, NoReturn

from axsparse.cli.parser import HELP, refuse_command, show_usage
from axsparse.runtime.process_exit import exit_process
from axsparse.runtime.version import __version__


class Command(NamedTuple):
    """A command: its module has a `main` that takes the other words and ends the process."""

    module: str
    purpose: str
    member: str = ""
    """The second word of a command that has but one, such as `prepare` of `data prepare`."""


COMMANDS = {
    "train": Command("axsparse.train", "train what a configuration file describes"),
    "config": Command("axsparse.cli.config", "show every setting and where it comes from"),
    "plan": Command("axsparse.cli.plan", "find a layout, its memory and its time, without a GPU"),
    "calibrate": Command("axsparse.cli.calibrate", "measure this machine, for plans of it"),
    "report": Command("axsparse.cli.report", "draw runs as a page for a browser"),
    "trace": Command("axsparse.cli.trace", "compare two traces of steps"),
    "data": Command("axsparse.cli.data", "turn text files into tokens", "prepare"),
    "ticket": Command("axsparse.cli.ticket", "say what a file of masks holds, or make one"),
    "prune": Command("axsparse.cli.prune", "say what a run would prune, and what not and why"),
    "checkpoint": Command("axsparse.cli.checkpoint", "look at what a run saved"),
    "generate": Command("axsparse.cli.generate", "continue a text with a trained model"),
    "evaluate": Command("axsparse.cli.evaluate", "measure a trained model on validation data"),
    "export": Command("axsparse.cli.export", "write what was trained for other libraries"),
    "submit": Command("axsparse.cli.submit", "give a training run to SLURM or LSF"),
    "launch": Command(
        "axsparse.cli.restarting_launch", "train on this machine, and go on after failures"
    ),
    "doctor": Command(
        "axsparse.cli.doctor.doctor", "check whether this machine is fit for training"
    ),
    "completion": Command("axsparse.cli.completion", "let a shell complete commands"),
}


def usage() -> str:
    """All commands, a line each."""
    lines = [
        f"  {name:10} {command.purpose} (axsparse {f'{name} {command.member}'.strip()} --help)\n"
        for name, command in COMMANDS.items()
    ]
    return "usage: axsparse COMMAND ...\n\ncommands:\n" + "".join(lines)


def main() -> NoReturn:
    """Hand over to the command that is named, which loads no library of another one."""
    word, *others = sys.argv[1:] or ["--help"]
    if word == "help" and others:
        word, others = others[0], [*others[1:], "--help"]
    if word in COMMANDS:
        import_module(COMMANDS[word].module).main(others)
    if word in HELP:
        show_usage(usage())
    if word == "--version":
        print(f"axsparse {__version__}")
        exit_process()
    refuse_command(word, COMMANDS)


if __name__ == "__main__":
    main()
