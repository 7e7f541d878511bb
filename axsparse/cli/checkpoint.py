"""`axsparse checkpoint verify | prune`: checks or removes checkpoints of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from axsparse.cli.parser import CommandParser, integer, say
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import AxsparseError, ConfigError, MissingInputError, writing
from axsparse.runtime.files.run_folder import RunLock

# Checkpoints are imported late, so that --help does not load torch.

DESCRIPTION = """\
Look at the checkpoints of a run. DIR is a run directory, or one checkpoint in it:

  axsparse checkpoint verify runs/my_run
  axsparse checkpoint verify runs/my_run/checkpoints/step-500
  axsparse checkpoint prune runs/my_run --keep-last 1
"""


def parser() -> CommandParser:
    group = CommandParser(prog="axsparse checkpoint", description=DESCRIPTION)
    text = "remove checkpoints, never the newest whole one; other jobs must not use the run"
    for name, work, purpose in (
        ("verify", _verify, "read every file and compare its size and hash with the manifest"),
        ("prune", _prune, text),
    ):
        subparser = group.add_subcommand(name, work, help=purpose, description=purpose)
        subparser.add_argument("path", metavar="DIR", type=Path)
    which = subparser.add_mutually_exclusive_group(required=True)
    text = (
        "keep the N newest whole checkpoints, the best, and the newest whose weights a later step "
        "has trained on"
    )
    which.add_argument("--keep-last", metavar="N", type=integer(), help=text)
    text = "remove those of later steps"
    which.add_argument("--after", metavar="STEP", type=integer(0), help=text)
    return group


def _verify(arguments: argparse.Namespace) -> None:
    """Print a line for each checkpoint, and raise the first error after all of them."""
    from axsparse.training.checkpoint import checkpoint_folder, verification

    failures = []
    for path in _checkpoints(arguments.path):
        try:
            opened = verification.open_checkpoint(path)
            verification.verify(opened)
        except AxsparseError as error:  # noqa: PERF203 - reading takes longer
            failures.append(error)
            say(f"✗ {path}")
        else:
            manifest = opened.manifest
            say(f"✓ {path}: {len(manifest.files)} files, {format_bytes(manifest.nbytes)}")
    for folder in checkpoint_folder.unfinished(arguments.path / checkpoint_folder.CHECKPOINTS):
        say(f"  {folder}: not finished, never used; goes with the next checkpoint")
    if failures:
        raise failures[0]


def _prune(arguments: argparse.Namespace) -> None:
    """Remove old or late checkpoints of a run that is not in use; one complete one always stays."""
    from axsparse.training.checkpoint import checkpoint_folder, verification

    path, keep_last, after = arguments.path, arguments.keep_last, arguments.after
    folder = path / checkpoint_folder.CHECKPOINTS
    path_of = partial(checkpoint_folder.path_of, folder)
    if not folder.is_dir():
        raise MissingInputError(f"checkpoint prune {path}: is no run with {folder.name}/; name one")

    def is_complete(step: int) -> bool:
        return verification.is_complete(path_of(step))

    lock = RunLock(path)
    try:
        with writing(f"{folder}:", "nothing else went"):
            if keep_last is not None:
                gone = checkpoint_folder.outdated(folder, keep_last, 0, is_complete)
                kept = _kept_also(path, is_complete)
            else:
                steps = verification.steps_in(path)
                gone, kept = [step for step in steps if step > after], {}
                if gone and not any(is_complete(step) for step in steps if step <= after):
                    raise ConfigError(
                        f"--after: {after} would leave no whole checkpoint; choose a later step"
                    )
            for step in gone:
                if step in kept:
                    say(f"kept {path_of(step)}: it {kept[step]}")
                    continue
                checkpoint_folder.remove(path_of(step))
                say(f"removed {path_of(step)}")
    finally:
        lock.release()


def _kept_also(run: Path, is_complete: Callable[[int], bool]) -> dict[int, str]:
    """The steps of checkpoints that training would keep, and why, as the newest that can be read
    says."""
    from axsparse.training.checkpoint import checkpoint_folder, verification

    folder = run / checkpoint_folder.CHECKPOINTS
    for step in verification.steps_in(run):
        try:
            opened = verification.open_checkpoint(checkpoint_folder.path_of(folder, step))
        except AxsparseError:
            continue
        return checkpoint_folder.kept_also(folder, opened.manifest.progress, is_complete)
    return {}


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or all of the run that it is, oldest first."""
    from axsparse.training.checkpoint import checkpoint_folder, verification

    if checkpoint_folder.step_of(path.resolve()) is not None:
        return [path]
    steps = verification.steps_in(path)
    if not steps:
        raise MissingInputError(
            f"checkpoint {path}: neither a checkpoint nor a run that has one; name one"
        )
    folder = path / checkpoint_folder.CHECKPOINTS
    return [checkpoint_folder.path_of(folder, step) for step in reversed(steps)]
