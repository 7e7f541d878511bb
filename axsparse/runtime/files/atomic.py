"""Files and folders that appear complete or not at all, and outlast a loss of power."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"
"""Part of the name of a file or folder that is being written; the name ends in a unique number."""
BEFORE = ".before"
"""Follows it in the name of a folder that is being replaced."""


@contextlib.contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A path next to `path`, at which the code within writes a file or a folder.

    At the end the file or folder gets the name `path` and replaces what had this name; a folder
    that is replaced is moved aside first. If the code within raises, what it has written is
    removed. The file and its name are on the disk afterwards; the files in a folder are if their
    writer has put them there. Raises OSError.
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}{secrets.token_hex(4)}")
    try:
        yield unfinished
        if unfinished.is_dir():
            _replace_folder(unfinished, path)
        else:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        sync_folder(path.parent)
    finally:
        _remove(unfinished)


def remove_unfinished(path: Path) -> None:
    """Remove unfinished files of killed processes of `new_path(path)`, and give a folder back its
    name that one of them had moved aside; no other process may use it."""
    for left in path.absolute().parent.glob(f".{glob.escape(path.name)}{UNFINISHED}*"):
        if left.suffix == BEFORE and not os.path.lexists(path):
            left.rename(path)
        else:
            _remove(left)


def write_new(path: Path, content: bytes | Path) -> None:
    """Write a new file of these bytes, or a copy of a file, which is on the disk once this returns;
    OSError if it exists already."""
    with path.open("xb") as file:
        if isinstance(content, Path):
            with content.open("rb") as source:
                shutil.copyfileobj(source, file)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put on the disk which names were added to a folder, changed in it or removed from it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(unfinished: Path, path: Path) -> None:
    if not path.exists():
        unfinished.rename(path)
        return
    before = unfinished.with_name(f"{unfinished.name}{BEFORE}")
    path.rename(before)
    try:
        unfinished.rename(path)
    except OSError:
        before.rename(path)
        raise
    _remove(before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
