"""Checks that the files of a checkpoint are as they were written, by size and hash."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from axsparse.runtime.errors import AxsparseError, DataError, reading
from axsparse.training.checkpoint.checkpoint_folder import step_of
from axsparse.training.checkpoint.manifest import (
    CheckpointManifest,
    FileEntry,
    open_plain,
    read_manifest,
)

PIECE = 1 << 22
"""Number of bytes that are read at a time."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, but not its files."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Number of steps done when it was saved."""
        return self.manifest.progress.step


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint; MissingInputError without a manifest, DataError if that is damaged."""
    manifest = read_manifest(path)
    named = step_of(path)
    if named is not None and named != manifest.progress.step:
        raise DataError(
            f"checkpoint {path}: was saved after step {manifest.progress.step}; give it its name "
            "back"
        )
    return Checkpoint(path, manifest)


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Read the named files, or all, and compare them with the manifest.

    MissingInputError for one that cannot be read, DataError for one that has changed.
    """
    entries = checkpoint.manifest.files
    for name in entries if names is None else names:
        found = read_entry(checkpoint.path, name, entries[name].bytes)
        if found.bytes != entries[name].bytes:
            raise DataError(
                f"checkpoint {checkpoint.path}: {name} has {found.bytes} bytes, its manifest says "
                f"{entries[name].bytes}; resume from another one"
            )
        if found.xxh3 != entries[name].xxh3:
            raise DataError(
                f"checkpoint {checkpoint.path}: {name} has another hash than its manifest says; "
                "resume from another one"
            )


def read_entry(folder: Path, name: str, expected: int | None = None) -> FileEntry:
    """The size and hash of a file on the disk; MissingInputError if it cannot be read.

    A file of another size than `expected` is not read: its hash is that of no bytes.
    """
    digest = xxhash.xxh3_128()
    with (
        reading(f"checkpoint {folder}: {name}", "resume from another one"),
        open_plain(folder / name) as file,
    ):
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected:
            return FileEntry(bytes=size, xxh3=digest.hexdigest())
        while piece := file.read(PIECE):
            digest.update(piece)
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are as they were written."""
    try:
        verify(open_checkpoint(path))
    except AxsparseError:
        return False
    return True
