"""The folder of a run's checkpoints, in which each appears completely or not at all.

    step-40/        a checkpoint
    step-60.tmp/    one that is being written, or was when the run was killed
    step-20.old/    one that is being removed, or was

Renaming is one indivisible step, and is done once the files are on the disk. Checkpoints are
ordered by step, never by time.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from axsparse.runtime.files.atomic import sync_folder, write_new
from axsparse.training.checkpoint.manifest import MANIFEST_FILE
from axsparse.training.progress import Progress

CHECKPOINTS = "checkpoints"
"""The name of this folder in a run directory."""
UNFINISHED, REMOVED = ".tmp", ".old"
"""Suffixes of the name of a checkpoint that is being written, or being removed."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_REMAINS = re.compile(rf"{_STEP.pattern}({re.escape(UNFINISHED)}|{re.escape(REMOVED)})")


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return folder / f"step-{step}"


def unfinished_path_of(folder: Path, step: int) -> Path:
    """The path at which the checkpoint of a step is written."""
    return folder / f"step-{step}{UNFINISHED}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for other names."""
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, complete or damaged, newest first."""
    steps = (step_of(path) for path in _folders(folder))
    return sorted((step for step in steps if step is not None), reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """The checkpoints that killed runs left half written or half removed."""
    return sorted(path for path in _folders(folder) if _REMAINS.fullmatch(path.name))


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, and those that links in it point to; none if it does not exist."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder to write the checkpoint of a step in, and return it.

    What killed runs left unfinished is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in unfinished(folder):
        _delete(path)
    partial = unfinished_path_of(folder, step)
    partial.mkdir()
    return partial


def commit(partial: Path, manifest: bytes) -> Path:
    """Give a checkpoint whose files are on the disk its manifest and its name.

    It replaces a checkpoint of the same step.
    """
    write_new(partial / MANIFEST_FILE, manifest)
    sync_folder(partial)
    final = partial.with_name(partial.name.removesuffix(UNFINISHED))
    if final.exists():
        remove(final)
    partial.rename(final)
    sync_folder(final.parent)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint; its name disappears first, so that no part of it is ever found."""
    gone = path.with_name(path.name + REMOVED)
    path.rename(gone)
    sync_folder(path.parent)
    _delete(gone)


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one, but not the link's target."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def outdated(
    folder: Path, keep_last: int, keep_every: int, is_complete: Callable[[int], bool]
) -> list[int]:
    """The steps whose checkpoints are to be removed.

    Kept are the `keep_last` newest complete ones, everything newer than those, and the multiples of
    `keep_every`. A damaged checkpoint does not count as one of the newest.
    """
    whole = 0
    gone = []
    for step in saved_steps(folder):
        if whole < keep_last:
            whole += is_complete(step)
        elif not (keep_every and step % keep_every == 0):
            gone.append(step)
    return gone


def kept_also(
    folder: Path, progress: Progress, is_complete: Callable[[int], bool]
) -> dict[int, str]:
    """The steps whose checkpoints stay in addition to the newest ones, and why; `progress` is the
    newest checkpoint's.

    Weights that no later step has trained on may be ruined already. So the newest checkpoint whose
    weights a later step has trained on stays as well.
    """
    kept = {}
    if progress.best is not None:
        kept[progress.best.step] = "has the lowest validation loss"
    trained_on = (step for step in saved_steps(folder) if step < progress.last_good)
    confirmed = next(filter(is_complete, trained_on), None)
    if confirmed is not None:
        kept[confirmed] = "is the newest whose weights a later step has trained on"
    return kept
