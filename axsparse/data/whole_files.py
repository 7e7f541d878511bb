"""Files that appear complete or not at all, and the lock that reserves a folder for one run."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from axsparse.runtime.errors import OutputError, writing
from axsparse.runtime.files.atomic import UNFINISHED, new_path
from axsparse.runtime.files.run_lock import FileLock

BLOCK = 1 << 20
"""Bytes that are read at a time."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which gets its name once it is complete and on the disk.

    Raises OutputError if the operating system refuses any of this.
    """
    with writes(path), new_path(path) as unfinished, unfinished.open("wb") as file:
        yield file


def writes(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an OSError within the block into an OutputError about `path`."""
    return writing(f"--out: {path}", "free the disk, or choose another place")


def copy_file(source: Path, path: Path) -> None:
    """Copy a small file; the copy appears complete or not at all."""
    with new_file(path) as file:
        file.write(source.read_bytes())


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed runs left unfinished."""
    for path in folder.glob(f"*{UNFINISHED}*"):
        path.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """BLAKE2b-128 of a file's contents, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Reserve a folder for this process; yields False if the file system has no locks.

    The lock ends with the process, however that ends. Raises OutputError if another process
    holds it.
    """
    path = folder / ".lock"
    try:
        lock = FileLock(path)
    except BlockingIOError:
        raise OutputError(
            f"--out: {folder} is being prepared by another process; wait for it, or choose "
            "another folder"
        ) from None
    except OSError as reason:
        with writes(path):
            raise reason
    yield lock.problem is None
    lock.release()
