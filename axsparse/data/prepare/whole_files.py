"""Files that appear whole or not at all, and the lock that keeps a folder to one run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from axsparse.runtime.errors import OutputError
from axsparse.runtime.files.durable import sync_folder

BLOCK = 1 << 20
_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name once it is complete and on the disk.

    Raises OutputError for whatever keeps it from being written.
    """
    # Of this process only: a worker of a run that was killed may outlive it for a moment.
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


@contextlib.contextmanager
def writes(path: Path) -> Iterator[None]:
    """OutputError for what the operating system refuses while `path` is written."""
    try:
        yield
    except OSError as reason:
        raise OutputError(
            f"--out: {path} cannot be written ({reason.strerror}); free the disk, or choose "
            "another place"
        ) from reason


def copy_file(source: Path, path: Path) -> None:
    """A small file once more, complete or not at all."""
    with new_file(path) as file:
        file.write(source.read_bytes())


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left half written."""
    for path in folder.glob(f"*{_UNFINISHED}*"):
        path.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """BLAKE2b-128 of a file, hex."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder for this process; False where the file system knows no locks.

    A lock ends with its process, however that ends. Raises OutputError if another has it.
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
