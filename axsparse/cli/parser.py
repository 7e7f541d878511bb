"""The base of all commands, and their table: one line for each mistake, one rank that speaks."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from axsparse.runtime.errors import (
    EXIT_CONFIG,
    AxsparseError,
    ConfigError,
    OutputError,
    writing,
)
from axsparse.runtime.files.paths import expanded, kind_of
from axsparse.runtime.process import code_of_interrupt, exit_process, speaks

Work = Callable[[argparse.Namespace], None]
"""The function of a command; an AxsparseError ends the process with its exit code and its line."""
EXIT_CODES = """\
exit codes:
  0 done   65 data or a checkpoint is damaged, or does not fit   66 input missing
  70 a rank failed   73 another one has the output   74 output cannot be written
  75 saved when asked to stop   78 what is asked for cannot be run
  130 interrupted
"""
MOST = 10_000_000
"""The largest count that an option takes, unless it says otherwise."""


SHORT = {
    "steps": "train.steps",
    "run_dir": "run_dir",
    "sparsity": "pruning.sparsity",
    "method": "pruning.method",
    "teacher": "train.teacher",
    "memory": "layout.memory_per_rank",
    "sequence_length": "data.sequence_length",
}
"""The options that are short forms of `--set`, and their keys."""
PATHS = ("run_dir", "teacher")
"""The short forms whose values are paths."""


class Once(argparse._StoreAction):
    """Stores the value of an option; a second one is a mistake."""

    _seen: argparse.Namespace | None = None

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *given: Any
    ) -> None:
        if self.option_strings and self._seen is namespace:
            raise argparse.ArgumentError(self, "given twice; keep one of them")
        self._seen = namespace
        super().__call__(parser, namespace, *given)


class CommandParser(argparse.ArgumentParser):
    """The options of a command; a mistake in them is one line and ends the process with 78."""

    def __init__(self, work: Work | None = None, **settings: Any) -> None:
        """Keeps the line breaks of help texts, adds the exit codes unless the texts have them, and
        rejects abbreviated options.

        `work` is carried out by `run_command` on the arguments that it has read.
        """
        end = settings.get("epilog", "")
        if "exit codes:" not in end:
            settings["epilog"] = f"{end}\n{EXIT_CODES}" if end else EXIT_CODES
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )
        self.register("type", Path, path)
        self.register("action", None, Once)
        self.set_defaults(work=work)

    _configuration: str | None = None
    """The configuration that the arguments name, once they are read."""

    # Reason: argparse's own stubs have an overload for each way to leave arguments out.
    def parse_known_args(self, *given: Any) -> tuple[Any, list[str]]:  # type: ignore[override]
        found, rest = super().parse_known_args(*given)
        self._configuration = getattr(found, "config", None) or getattr(found, "model", None)
        overridden = {text.partition("=")[0].strip() for text in getattr(found, "overrides", ())}
        for name, key in SHORT.items():
            if key in overridden and getattr(found, name, None) is not None:
                option = name.replace("_", "-")
                self.error(f"argument --{option}: --set {key} is given as well; keep one of them")
        return found, rest

    def error(self, message: str) -> NoReturn:
        from axsparse.config.messages import nearest_choice

        shown = "".join(letter if letter.isprintable() else " " for letter in message)
        is_argparse = re.search("^unrecognized |: invalid choice: ", shown) or "; " not in shown
        file = re.fullmatch(r"unrecognized arguments: (\S+\.ya?ml)", shown)
        if file is not None and "--config" in self._option_string_actions:
            if self._configuration is not None:
                reject(f"{shown}, and {self._configuration} is named already; keep one of them")
            reject(f"{shown}; write --config {file[1]}")
        unknown = re.match(r"unrecognized arguments: (\S+)", shown)
        if unknown is not None and (instead := self._instead_of(unknown[1])):
            reject(f"{shown}; {instead}")
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", shown)
        near = nearest_choice(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        reject(f"{shown}{near or '; see --help'}" if is_argparse else shown)

    def _instead_of(self, given: str) -> str:
        """The suggestion for an argument that is no option: the nearest one, or the setting that
        has its name; empty if there is none."""
        from axsparse.config.load import PLACES, full_key
        from axsparse.config.messages import FOREIGN_KEYS, NEARNESS

        option, own = given.partition("=")[0], self._option_string_actions
        name = option.lstrip("-").replace("-", "_")
        takes_all = "--config" in own  # else --set is for the data of a run
        if "--set" in own and not option.startswith("-") and "=" in given:
            return f"write --set {given}" if takes_all or option in PLACES else ""
        if "--set" in own and name != option:
            with suppress(ConfigError):
                key, comma, unit = FOREIGN_KEYS.get(name, name).partition(",")
                if takes_all or full_key(key) in PLACES:
                    return f"write --set {full_key(key)}=VALUE{comma}{unit}"
        near = get_close_matches(option, own, 1, NEARNESS)
        return f"did you mean {near[0]}?" if near else ""

    def print_help(self, file: Any = None) -> None:
        del file  # argparse names none
        try:
            if speaks():
                say(self.format_help().rstrip())
        except OutputError as error:
            exit_process(error.exit_code, f"error: {error}")


def integer(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The `type` of an option that is a whole number between two bounds."""

    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no whole number from {least} to {most}; choose one"
        )

    return number


def path(text: str) -> Path:
    """The `type` of all options that are a `Path`; an empty one would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no path; name one, such as . for this folder"
        )
    try:
        return Path(expanded(text))
    except ConfigError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None


def decimal(rule: str, passes: Callable[[float], bool]) -> Callable[[str], float]:
    """The `type` of an option that is a number; `rule` says which numbers pass."""

    def number(text: str) -> float:
        with suppress(ValueError):
            value = float(text)
            if math.isfinite(value) and passes(value):
                return value
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no {rule}")

    return number


def matching(pattern: str, rule: str) -> Callable[[str], str]:
    """The `type` of an option whose text a regular expression matches; `rule` says which does."""

    def checked(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is no {rule}")
        return text

    return checked


share = decimal("number from 0 to below 1, such as 0.9", lambda value: 0 <= value < 1)
"""The `type` of an option that is a share of a whole, never all of it."""


def step_or_best(text: str) -> int | Literal["best"]:
    """The argument of `--step`: the number of a step, or the checkpoint of lowest loss."""
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a step nor best")
    return int(text)


def run_command(parser: CommandParser, argv: Sequence[str]) -> NoReturn:
    """Do the work of a command on the one rank that speaks, and end the process.

    The exit code is 0, or the AxsparseError's that the work raises, whose message becomes one line.
    Ctrl-C exits with 130, SIGTERM with 143, SIGHUP with 129; a default of the parser,
    `interrupted`, is the line.
    """
    interrupted = "interrupted"
    try:
        if speaks():
            arguments = parser.parse_args(argv)
            interrupted = getattr(arguments, "interrupted", interrupted)
            arguments.work(arguments)
    except AxsparseError as error:
        exit_process(error.exit_code, f"error: {error}")
    except KeyboardInterrupt as failure:
        exit_process(code_of_interrupt(failure), f"error: {interrupted}")
    exit_process()


def reject(message: str) -> NoReturn:
    """End the process with 78; one of many ranks says why."""
    exit_process(EXIT_CONFIG, f"error: {message}" if speaks() else None)


def reject_early(
    arguments: argparse.Namespace, overrides: Sequence[str], *, is_part: bool = False
) -> None:
    """End the job if its configuration breaks a rule that needs neither torch, ranks nor data.

    Of many ranks the one that speaks says so. Others that find a mistake start MPI, so that they
    can be ended, and continue: if the mistake is theirs alone, such as a file that is missing on
    one host, it is found again when all ranks read the configuration together. `is_part` as in
    `Config.as_part`.
    """
    from axsparse.config.load import configure
    from axsparse.config.validate import check_config
    from axsparse.runtime.connection import leave_before_start
    from axsparse.runtime.mpi.mpi_transport import wait_until_all_ranks_have_started

    try:
        config = configure(arguments.config, overrides)
        check_config(config.as_part() if is_part else config)
    except AxsparseError as error:
        if speaks():
            leave_before_start(str(error), error.exit_code)
        wait_until_all_ranks_have_started()


def say(text: str | bytes, *, end: str = "\n") -> None:
    """Print a result and `end`; a reader that has gone away, such as `head`, is no mistake.

    Nor are characters that the terminal has not, or that a path of other bytes has; bytes are
    printed as they are. Raises OutputError if stdout cannot be written.
    """
    if sys.stdout is None:
        raise OutputError("stdout: cannot be written (it is closed); open it")
    encoding = sys.stdout.encoding or "utf-8"
    with writing("stdout:", "free space where it goes, or send it elsewhere"):
        try:
            if isinstance(text, bytes):
                sys.stdout.buffer.write(text)
            else:
                sys.stdout.write(f"{text}{end}".encode(encoding, errors="replace").decode(encoding))
            sys.stdout.flush()
        except OSError as reason:
            # Python flushes stdout once more at the exit, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(reason, BrokenPipeError):
                raise


def add_configuration(add: Callable[..., object]) -> None:
    """The options that name a configuration; `add` is the `add_argument` of a parser or group."""
    add(
        "--config",
        metavar="FILE",
        help="a path, or the name of a bundled configuration such as quickstart.yaml; without it, "
        "the defaults (a training run then needs a --set)",
    )
    add_set(add, "override one key, such as layout.g_inter=2; may be repeated")


DATA = "data.path, data.blend or data.validation, where the data are now; may be repeated"
"""The help of `--set` for a run that is read."""


def add_set(add: Callable[..., object], text: str) -> None:
    """The option that overrides keys of a configuration."""
    metavar = "KEY=VALUE"
    add("--set", metavar=metavar, action="append", default=[], dest="overrides", help=text)


def add_checkpoint(add: Callable[..., object]) -> None:
    """The options that name a checkpoint of a run."""
    add("run", metavar="RUN", type=Path)
    add("--step", metavar="N", type=step_or_best, help="the checkpoint of this step, or best")


def is_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder, not a run; MissingInputError as `kind_of`."""
    return kind_of(f"{path}:", path / "config.json") == "file"


def override(key: str, path: Path | str) -> str:
    """KEY=VALUE for a path, which is quoted where YAML would read another value."""
    from axsparse.config.load import setting_to_yaml

    return setting_to_yaml(key, str(path)).replace(": ", "=", 1)


def add_run(add: Callable[..., object]) -> None:
    """The options of a run that are short forms of `--set`."""
    add("--steps", metavar="N", help="short for --set train.steps=N")
    add("--run-dir", metavar="DIR", help="short for --set run_dir=DIR")


def require_configuration(arguments: argparse.Namespace, command: str) -> None:
    """End the process with 78 if neither `--config` nor a `--set` names a model or data."""
    if arguments.config is None and not arguments.overrides:
        reject(
            f"{command}: nothing says what to train; name a configuration, such as "
            f"--config {_configuration_of(arguments) or 'quickstart.yaml'}"
        )


def _configuration_of(arguments: argparse.Namespace) -> str | None:
    """The configuration of the run that is gone on with, as in a shell; None if it has none."""
    from axsparse.runtime.files.run_folder import CONFIG_FILE

    resume = getattr(arguments, "resume", "auto")  # without the option: as of a submitted job
    path = Path((arguments.run_dir if resume == "auto" else resume) or os.devnull)
    folders = [path, *(each.parent for each in (path, path.parent) if each.name == "checkpoints")]
    files = (str(folder / CONFIG_FILE) for folder in folders)
    return next((shlex.quote(file) for file in files if os.path.isfile(file)), None)  # noqa: PTH113


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The overrides from `--set` and its short forms, as KEY=VALUE without spaces around KEY."""
    parted = (text.partition("=") for text in arguments.overrides)
    overrides = [f"{key.strip()}{equals}{value}" for key, equals, value in parted]
    for name, key in SHORT.items():
        value = getattr(arguments, name, None)
        if value is not None:
            overrides.append(override(key, value) if name in PATHS else f"{key}={value}")
    return overrides


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
    "prune": Command("axsparse.cli.prune", "prune and heal a model, or say what a run would prune"),
    "generate": Command("axsparse.cli.generate", "continue a text with a trained model"),
    "evaluate": Command("axsparse.cli.evaluate", "measure a trained model on validation data"),
    "export": Command("axsparse.cli.export", "write what was trained for other libraries"),
    "submit": Command("axsparse.cli.submit", "fill in a job script for SLURM, LSF, PBS or Flux"),
    "bundle": Command("axsparse.cli.bundle", "gather wheels for where there is no network"),
    "doctor": Command("axsparse.cli.doctor", "check whether this machine is fit for training"),
}


def all_parsers() -> dict[str, CommandParser]:
    """The command line of every command, by the words after `axsparse`; none loads torch."""
    parsers = [import_module(command.module).parser() for command in COMMANDS.values()]
    return {parser.prog.removeprefix("axsparse "): parser for parser in parsers}
