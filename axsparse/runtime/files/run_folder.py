"""Which folder is a run's, by the settings of the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
"""The file that each run directory has."""


def automatic_run_dirs(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3 and so on without an end."""
    for number in itertools.count(1):
        yield Path("runs") / (name if number == 1 else f"{name}-{number}")


def last_run(setting: str, name: str) -> Path | None:
    """The run that `run_dir` (the setting) means, or under `auto` the last run of the
    configuration's name; None without any."""
    if setting != "auto":
        return Path(setting) if (Path(setting) / METRICS_FILE).is_file() else None
    last = None
    for path in automatic_run_dirs(name):
        if not (path / METRICS_FILE).is_file():
            break
        last = path
    return last
