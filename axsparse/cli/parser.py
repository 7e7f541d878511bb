"""What all commands share: the command line, one line for each mistake, one rank that speaks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from axsparse.runtime.errors import EXIT_CONFIG, EXIT_INTERRUPTED, AxsparseError
from axsparse.runtime.launcher import speaks
from axsparse.runtime.process_exit import exit_process

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

HELP = ("-h", "--help", "help")
"""The words that ask for help in the place of a command."""


class CommandParser(argparse.ArgumentParser):
    """The options of a command; a mistake in them is one line and ends the process with 78."""

    def __init__(self, **settings: Any) -> None:
        """Keeps the line breaks of help texts, and refuses abbreviated options."""
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        shown = "".join(letter if letter.isprintable() else " " for letter in message)
        refuse(f"{shown}; see --help")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if speaks():
            super().print_help(file)


def step_or_best(text: str) -> int | Literal["best"]:
    """The argument of `--step`: the number of a step, or the checkpoint of lowest loss."""
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a step nor best")
    return int(text)


def run_command(work: Callable[[], None], *, interrupted: str | None = None) -> NoReturn:
    """Do the work of a command on the one rank that speaks, and end the process.

    The exit code is 0, or that of the AxsparseError that `work` raises, whose message becomes
    one line. Ctrl-C exits with 130, after the line `interrupted` if there is one.
    """
    try:
        if speaks():
            work()
    except AxsparseError as error:
        exit_process(error.exit_code, f"error: {error}")
    except KeyboardInterrupt:
        exit_process(EXIT_INTERRUPTED, None if interrupted is None else f"error: {interrupted}")
    exit_process()


def refuse(message: str) -> NoReturn:
    """End the process with 78; one of many ranks says why."""
    exit_process(EXIT_CONFIG, f"error: {message}" if speaks() else None)


def show_usage(usage: str) -> NoReturn:
    """Print which commands there are, on one of many ranks, and end the process."""
    sys.stdout.write(usage if speaks() else "")
    exit_process()


def refuse_command(word: str, known: Iterable[str], group: str = "") -> NoReturn:
    """End the process with 78 for a command that does not exist, naming the nearest that does.

    `group` is the command that `word` belongs to, such as "data" for `axsparse data prepare`.
    """
    nearest = get_close_matches(word[:60], known, n=1)
    mend = f"did you mean {nearest[0]}? " if nearest else ""
    where, command = (f"{group}: ", f"axsparse {group}") if group else ("", "axsparse")
    refuse(f"{where}no command {word!r}; {mend}see {command} --help")


def arguments_of(group: str, command: str, usage: str, argv: Sequence[str]) -> Sequence[str]:
    """What follows the one command of a group, such as `prepare` of `axsparse data`.

    Another word, or none, ends the process, with the usage where that was asked for.
    """
    if not argv or argv[0] in HELP:
        show_usage(usage)
    if argv[0] != command:
        refuse_command(argv[0], [command], group)
    return argv[1:]


def say(text: str) -> None:
    """Print a result; a reader that has gone away, such as `head`, is no mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more at the exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_configuration(add: Callable[..., object]) -> None:
    """The options that name a configuration; `add` is the `add_argument` of a parser or group."""
    add(
        "--config",
        metavar="FILE",
        help="a path, or the name of a bundled configuration such as quickstart.yaml; without it, "
        "the defaults (a training run then needs a --set)",
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
    """The options of a run that are short forms of `--set`."""
    add("--steps", metavar="N", help="short for --set train.steps=N")
    add("--run-dir", metavar="DIR", help="short for --set run_dir=DIR")


def require_configuration(arguments: argparse.Namespace, command: str) -> None:
    """End the process with 78 if neither `--config` nor a `--set` says what is trained."""
    if arguments.config is None and not arguments.overrides:
        refuse(
            f"{command}: nothing says what to train; name a configuration, such as "
            "--config quickstart.yaml"
        )


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """What `--set` and the options of `add_run` set, as KEY=VALUE; later ones win."""
    overrides = list(arguments.overrides)
    if arguments.steps is not None:
        overrides.append(f"train.steps={arguments.steps}")
    if arguments.run_dir is not None:
        overrides.append(f"run_dir={arguments.run_dir}")
    return overrides
