"""What the commands have in common: one line for a mistake, and one of many ranks speaks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from axsparse.runtime.errors import EXIT_CONFIG
from axsparse.runtime.launcher import speaks

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class CommandParser(argparse.ArgumentParser):
    """A command line of axsparse, which exits with 78 where it cannot be run."""

    def __init__(self, **settings: Any) -> None:
        """As its base; texts stand as they are written, and options are written out."""
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        if speaks():
            shown = "".join(letter if letter.isprintable() else " " for letter in message)
            print(f"axsparse: error: {shown}; see --help", file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if speaks():
            super().print_help(file)


def say(text: str) -> None:
    """Print what a command was asked for; a reader that has gone, `head` say, is no mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # At the exit Python would flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_configuration(add: Callable[..., object]) -> None:
    """The options that say what is configured; `add` is the `add_argument` of a parser or group."""
    add(
        "--config",
        metavar="FILE",
        help="a path, or the name of a bundled configuration such as quickstart.yaml; without it, "
        "the defaults",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one key, such as layout.g_inter=2; may be repeated",
    )


def add_run(add: Callable[..., object]) -> None:
    """The options of a run that are short for a setting."""
    add("--steps", metavar="N", help="short for --set train.steps=N")
    add("--run-dir", metavar="DIR", help="short for --set run_dir=DIR")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """What the options of `add_configuration` and `add_run` set, as KEY=VALUE; later ones win."""
    overrides = list(arguments.overrides)
    if arguments.steps is not None:
        overrides.append(f"train.steps={arguments.steps}")
    if arguments.run_dir is not None:
        overrides.append(f"run_dir={arguments.run_dir}")
    return overrides
