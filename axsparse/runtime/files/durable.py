"""Files and names that outlast a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def write_new(path: Path, content: bytes) -> None:
    """A new file, on the disk once this returns; OSError if there is one already."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names that were given or taken in a folder survive a loss of power from here on."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
