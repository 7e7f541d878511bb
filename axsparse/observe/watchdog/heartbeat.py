"""Heartbeats: every rank's watchdog writes a small file in the run directory, for the others.

Files work without MPI, which may be what hangs, and they still exist when a rank is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

HEARTBEATS = "heartbeat"
"""The folder of the heartbeats in the run directory, which exists while the run lasts."""
RECORD_BYTES = 1024
"""The size of every record, filled up with blanks, so that one call overwrites the last one. The
stacks of a rank that makes no progress follow its record, in separate lines."""


@dataclass(frozen=True)
class Heartbeat:
    """The activity of a rank at the time of writing."""

    written: int
    """How many heartbeats the rank has written; a rank whose number does not grow is silent."""
    quiet: float
    """Seconds since the rank made progress, by its own clock, since the clocks of hosts differ."""
    waits: bool
    """Whether the rank was waiting for others."""
    task: str
    step: int
    phase: str
    action: str
    awaited: tuple[str, ...]
    host: str
    process: int

    def __str__(self) -> str:
        """A description such as "compute (F3) of step 25", or "checkpoint after step 25
        (collective)"."""
        if self.task == "training":
            action = f" ({self.action})" if self.action else ""
            return f"{self.phase}{action} of step {self.step}"
        action = f", {self.action}" if self.action else ""
        return f"{self.task} after step {self.step} ({self.phase}{action})"


class HeartbeatFolder:
    """The folder of the heartbeats, as one rank uses it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """The folder, which need not exist, as `rank` uses it."""
        self.folder = folder
        self._own = self._path(rank)

    def reserve(self) -> None:
        """Take the space, so that heartbeats can be written even if the disk is full later.

        The folder exists. OSError if this rank cannot write there.
        """
        self._own.write_bytes(b" " * RECORD_BYTES)

    @staticmethod
    def clear(folder: Path) -> None:
        """Make the folder, or empty it; one rank calls this before a run. Raises OSError."""
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()

    def write(self, heartbeat: Heartbeat, stacks: str = "") -> None:
        """Write this rank's heartbeat, and its stacks for a report if it makes no progress.

        Makes the folder if another rank has just removed it as the last one. Raises OSError, on a
        full disk once the heartbeat is written.
        """
        record = json.dumps(asdict(heartbeat)).encode().ljust(RECORD_BYTES - 1) + b"\n"
        text = stacks.encode(errors="replace")
        # A network file system shows other hosts what was written once the file is closed.
        self.folder.mkdir(exist_ok=True)
        number = os.open(self._own, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(number, record, 0)
            os.pwrite(number, text, len(record))
            os.ftruncate(number, len(record) + len(text))
        finally:
            os.close(number)

    def read(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank; None if it has left, or is just writing."""
        try:
            values = json.loads(self._path(rank).read_bytes().partition(b"\n")[0])
            return Heartbeat(**{**values, "awaited": tuple(values["awaited"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def stacks_of(self, rank: int) -> str:
        """The stacks of a rank that makes no progress; empty if it has left none."""
        try:
            return self._path(rank).read_bytes().partition(b"\n")[2].decode(errors="replace")
        except OSError:
            return ""

    def claim(self) -> bool:
        """Whether this rank is the first that wants to report a hang. Raises OSError."""
        try:
            (self.folder / "hang").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def remove_own(self) -> None:
        """Take this rank's file away; the last rank removes the folder."""
        with contextlib.suppress(OSError):
            self._own.unlink()
            self.folder.rmdir()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"
