"""The directories that a run may get under `run_dir: auto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path


def automatic_run_dirs(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3 and so on without an end."""
    for number in itertools.count(1):
        yield Path("runs") / (name if number == 1 else f"{name}-{number}")
