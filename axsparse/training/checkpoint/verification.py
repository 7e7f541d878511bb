"""Whether a checkpoint is what was written: every file, by size and hash."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from axsparse.runtime.errors import AxsparseError, DataError, MissingInputError
from axsparse.training.checkpoint.checkpoint_folder import step_of
from axsparse.training.checkpoint.manifest import (
    CheckpointManifest,
    FileEntry,
    open_plain,
    read_manifest,
)

PIECE = 1 << 22
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read; its files have not."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self.manifest.progress.step


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest; MissingInputError without one, DataError if it is damaged."""
    manifest = read_manifest(path)
    named = step_of(path)
    if named is not None and named != manifest.progress.step:
        raise DataError(
            f"checkpoint {path}: was saved after step {manifest.progress.step}; give it its name "
            "back"
        )
    return Checkpoint(path, manifest)


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Read these files, or all; MissingInputError for one that is not there, DataError for one
    that is not as it was written."""
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
    """Size and hash of a file as it is on the disk; of one of another size than expected, no
    hash. MissingInputError if it cannot be read."""
    digest = xxhash.xxh3_128()
    try:
        with open_plain(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if expected is not None and size != expected:
                return FileEntry(bytes=size, xxh3=digest.hexdigest())
            while piece := file.read(PIECE):
                digest.update(piece)
    except OSError as reason:
        raise MissingInputError(
            f"checkpoint {folder}: {name} cannot be read ({reason.strerror}); resume from another "
            "one"
        ) from reason
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def is_whole(path: Path) -> bool:
    """Whether all of a checkpoint is as it was written."""
    try:
        verify(open_checkpoint(path))
    except AxsparseError:
        return False
    return True
