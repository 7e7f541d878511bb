"""Files that appear complete or not at all, and the lock that reserves a folder for one run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from axsparse.runtime.errors import OutputError, writing
from axsparse.runtime.files.durable import sync_folder

BLOCK = 1 << 20
"""Bytes that are read at a time."""
_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which gets its name once it is complete and on the disk.

    Raises OutputError if the operating system refuses any of this.
    """
    # The name contains the process: a worker of a killed run may outlive it for a moment.
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}{os.getpid()}")
    with writes(path):
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def writes(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an OSError within the block into an OutputError about `path`."""
    return writing(f"--out: {path}", "free the disk, or choose another place")


def copy_file(source: Path, path: Path) -> None:
    """Copy a small file; the copy appears complete or not at all."""
    with new_file(path) as file:
        file.write(source.read_bytes())


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed runs left unfinished."""
    for path in folder.glob(f"*{_UNFINISHED}*"):
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
    with writes(path):
        file = path.open("wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"--out: {folder} is being prepared by another process; wait for it, or choose "
                "another folder"
            ) from None
        except OSError:
            yield False
            return
        yield True
