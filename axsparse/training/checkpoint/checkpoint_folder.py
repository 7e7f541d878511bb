"""The folder of a run's checkpoints: how one appears, whole or not at all, and how one goes.

    step-40/        a checkpoint
    step-60.tmp/    one that is being written, or was when the run was killed
    step-20.old/    one that is being removed, or was

A name changes in one indivisible step, once what it stands for is on the disk. Checkpoints
are ordered by step, never by time.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from axsparse.runtime.files.durable import sync_folder, write_new
from axsparse.training.checkpoint.manifest import MANIFEST_FILE

CHECKPOINTS = "checkpoints"
"""In a run directory."""
UNFINISHED, REMOVED = ".tmp", ".old"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_REMAINS = re.compile(rf"{_STEP.pattern}({re.escape(UNFINISHED)}|{re.escape(REMOVED)})")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for other names."""
    found = _STEP.fullmatch(path.name)
    return None if found is None else int(found[1])


def saved_steps(folder: Path) -> list[int]:
    """The steps with a checkpoint, whole or damaged, newest first."""
    steps = (step_of(path) for path in _folders(folder))
    return sorted((step for step in steps if step is not None), reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """What killed runs left behind half written or half removed."""
    return sorted(path for path in _folders(folder) if _REMAINS.fullmatch(path.name))


def _folders(folder: Path) -> list[Path]:
    """Folders in a folder, links left out; none of one that is not there."""
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step in; what killed runs left goes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in unfinished(folder):
        shutil.rmtree(path)
    partial = folder / f"step-{step}{UNFINISHED}"
    partial.mkdir(mode=0o700)
    return partial


def commit(partial: Path, manifest: bytes) -> Path:
    """Let a checkpoint whose files are on the disk appear; one of its step that is there goes."""
    write_new(partial / MANIFEST_FILE, manifest)
    sync_folder(partial)
    final = partial.with_name(partial.name.removesuffix(UNFINISHED))
    if final.exists():
        remove(final)
    partial.rename(final)
    sync_folder(final.parent)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint: at no moment is a part of it under its name."""
    gone = path.with_name(path.name + REMOVED)
    path.rename(gone)
    sync_folder(path.parent)
    shutil.rmtree(gone)


def outdated(
    folder: Path, keep_last: int, keep_every: int, is_whole: Callable[[int], bool]
) -> list[int]:
    """The steps whose checkpoints may go: all before the `keep_last` newest whole ones but
    multiples of `keep_every`.

    A damaged one counts for nothing, so that no whole one goes for its sake.
    """
    whole = 0
    gone = []
    for step in saved_steps(folder):
        if whole < keep_last:
            whole += is_whole(step)
        elif not (keep_every and step % keep_every == 0):
            gone.append(step)
    return gone
