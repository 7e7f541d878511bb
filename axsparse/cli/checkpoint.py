"""`axsparse checkpoint verify | show | prune`: checks, lists or removes checkpoints of a run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from axsparse.cli.parser import CommandParser, run_command, say
from axsparse.runtime.errors import AxsparseError, ConfigError, MissingInputError, writing

DESCRIPTION = """\
Look at the checkpoints of a run. DIR is a run directory, or one checkpoint in it:

  axsparse checkpoint show runs/my_run
  axsparse checkpoint verify runs/my_run/checkpoints/step-500
  axsparse checkpoint prune runs/my_run --keep-last 1

exit codes:
  0 done   65 a checkpoint is damaged   66 a file is missing   74 a place cannot be written
  78 arguments that cannot be run
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        prog="axsparse checkpoint",
        description=DESCRIPTION,
    )
    commands = arguments.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("verify", "read every file and compare its size and hash with the manifest"),
        ("show", "say what the manifests say"),
        (
            "prune",
            "remove checkpoints, never the newest whole one; other jobs must not use the run",
        ),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("path", metavar="DIR", type=Path)
        if name == "prune":
            command.add_argument(
                "--keep-last", metavar="N", type=int, help="keep the N newest whole checkpoints"
            )
            command.add_argument(
                "--after", metavar="STEP", type=int, help="remove those of later steps"
            )
    return arguments


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Carry out the command, and end the process with its exit code; one of many ranks works."""
    run_command(lambda: _carry_out(parser().parse_args(argv)))


def _carry_out(arguments: argparse.Namespace) -> None:
    if arguments.command == "verify":
        verify(arguments.path)
    elif arguments.command == "show":
        show(arguments.path)
    else:
        prune(arguments.path, arguments.keep_last, arguments.after)


def verify(path: Path) -> None:
    """Verify one checkpoint, or all of a run, and print a line for each.

    Raises the error of the first that is damaged or incomplete, after all lines are printed.
    """
    failures = [failure for one in _checkpoints(path) if (failure := _failure(one)) is not None]
    for left in _unfinished(path):
        say(f"  {left}: not finished, never used; goes with the next checkpoint")
    if failures:
        raise failures[0]


def _failure(path: Path) -> AxsparseError | None:
    """Verify one checkpoint and print a line; the error if it is damaged, else None."""
    from axsparse.runtime.console import format_bytes
    from axsparse.training.checkpoint.verification import open_checkpoint
    from axsparse.training.checkpoint.verification import verify as verify_files

    try:
        opened = open_checkpoint(path)
        verify_files(opened)
    except AxsparseError as error:
        say(f"✗ {path}")
        return error
    files, size = len(opened.manifest.files), format_bytes(opened.manifest.nbytes)
    say(f"✓ {path}: {files} files, {size}")
    return None


def show(path: Path) -> None:
    """Print what the manifests say, without reading the files that they name."""
    from axsparse.runtime.console import format_bytes, format_count
    from axsparse.training.checkpoint.verification import flat, open_checkpoint

    for checkpoint in _checkpoints(path):
        manifest = open_checkpoint(checkpoint).manifest
        progress, said = manifest.progress, {**flat(manifest.config), **manifest.versions}
        parameters = [p for layer in manifest.layers.values() for p in layer.parameters.values()]
        kept = sum(entry.kept for entry in parameters)
        numel = sum(math.prod(entry.shape) for entry in parameters)
        say(f"{checkpoint}")
        say(
            f"  step {progress.step}, {progress.updates} updates, loss scale "
            f"{progress.loss_scale:g}, {manifest.data.position} samples of {manifest.data.name}"
        )
        if progress.best is not None:
            say(
                f"  lowest validation loss so far {progress.best.loss:.4f}, after step "
                f"{progress.best.step}"
            )
        say(
            f"  {len(manifest.layers)} layers, {format_count(numel)} parameters, "
            f"{format_count(kept)} kept, {format_bytes(manifest.nbytes)}"
        )
        say(
            f"  {said.get('precision')}, {said.get('optimizer.name')}, pruning "
            f"{said.get('pruning.method')}, seed {said.get('seed')}; axsparse "
            f"{said.get('axsparse')}, torch {said.get('torch')}"
        )


def prune(path: Path, keep_last: int | None, after: int | None) -> None:
    """Remove all but the newest `keep_last` whole checkpoints and the best, or those of steps after
    `after`.

    The run must not be in use, and one whole checkpoint always stays.
    """
    from axsparse.runtime.files.run_lock import RunLock
    from axsparse.training.checkpoint.checkpoint_folder import (
        CHECKPOINTS,
        outdated,
        path_of,
        remove,
    )
    from axsparse.training.checkpoint.verification import is_whole, steps_in

    if (keep_last is None) == (after is None):
        raise ConfigError("checkpoint prune: give either --keep-last or --after")
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"--keep-last: {keep_last} would leave none; choose at least 1")
    folder = path / CHECKPOINTS
    if not folder.is_dir():
        raise MissingInputError(f"checkpoint prune {path}: is no run with {CHECKPOINTS}/; name one")
    lock = RunLock(path)
    try:
        with writing(f"{folder}:", "nothing else went"):
            if after is not None:
                gone = [step for step in steps_in(path) if step > after]
                left = [step for step in steps_in(path) if step <= after]
                if gone and not any(is_whole(path_of(folder, step)) for step in left):
                    raise ConfigError(
                        f"--after: {after} would leave no whole checkpoint; choose a later step"
                    )
            else:
                assert keep_last is not None
                best = _best_step(path)
                gone = [
                    step
                    for step in outdated(
                        folder, keep_last, 0, lambda step: is_whole(path_of(folder, step))
                    )
                    if step != best
                ]
            for step in gone:
                remove(path_of(folder, step))
                say(f"removed {path_of(folder, step)}")
    finally:
        lock.release()


def _best_step(run: Path) -> int | None:
    """The step of the checkpoint of lowest validation loss, as the newest whole one names it."""
    from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of
    from axsparse.training.checkpoint.verification import open_checkpoint, steps_in

    for step in steps_in(run):
        try:
            best = open_checkpoint(path_of(run / CHECKPOINTS, step)).manifest.progress.best
        except AxsparseError:
            continue
        return None if best is None else best.step
    return None


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or all of the run that it is, oldest first."""
    from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of, step_of
    from axsparse.training.checkpoint.verification import steps_in

    if step_of(path.resolve()) is not None:
        return [path]
    steps = steps_in(path)
    if not steps:
        raise MissingInputError(
            f"checkpoint {path}: neither a checkpoint nor a run that has one; name one"
        )
    return [path_of(path / CHECKPOINTS, step) for step in reversed(steps)]


def _unfinished(path: Path) -> list[Path]:
    from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, unfinished

    return unfinished(path / CHECKPOINTS)
