"""How the watchdogs of all ranks know of one another: a small file a rank, in the run directory.

Files need nothing of MPI, which may be what hangs, and still tell of a rank that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HEARTBEATS = "heartbeat"
"""In the run directory, while the run lasts."""
RECORD_BYTES = 1024
"""Of every record, blanks included: it is written over the one before in one call."""


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank stood when it wrote this."""

    written: int
    """How many it has written; a rank whose number stays is not heard of."""
    quiet: float
    """Seconds since it got on with anything, by its own clock; clocks of hosts differ."""
    waits: bool
    """Whether it waited for other ranks just then."""
    task: str
    step: int
    phase: str
    action: str
    awaited: tuple[str, ...]
    host: str
    process: int

    def __str__(self) -> str:
        """ "compute (F3) of step 25", or "checkpoint after step 25 (collective)"."""
        if self.task == "training":
            action = f" ({self.action})" if self.action else ""
            return f"{self.phase}{action} of step {self.step}"
        action = f", {self.action}" if self.action else ""
        return f"{self.task} after step {self.step} ({self.phase}{action})"

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        """ValueError for anything else."""
        found = json.loads(text)
        names = {field.name for field in fields(Heartbeat)}
        if not isinstance(found, Mapping) or set(found) != names:
            raise ValueError("no heartbeat")
        values: dict[str, Any] = {**found, "awaited": tuple(found["awaited"])}
        return Heartbeat(**values)


@dataclass(frozen=True)
class RankAnswer:
    """What a rank says once it is asked."""

    heartbeat: Heartbeat
    stacks: str
    """Of all its Python threads."""


class Board:
    """The folder of the heartbeats, as one rank sees it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """The folder exists. OSError if this rank cannot write there."""
        self.folder = folder
        self._own = self._path(rank)
        self._answer = self._answer_path(rank)
        self._hang = folder / "hang"
        # From here on a full disk takes no heartbeat away.
        self._own.write_bytes(b" " * RECORD_BYTES)

    @staticmethod
    def clear(folder: Path) -> None:
        """Before a run, on one rank: an empty folder. OSError if that cannot be."""
        folder.mkdir(exist_ok=True, mode=0o700)
        for path in folder.iterdir():
            path.unlink()

    def write(self, heartbeat: Heartbeat) -> None:
        """Let others know. OSError if that cannot be."""
        record = heartbeat.to_json().encode().ljust(RECORD_BYTES)
        # Opened each time: a network file system shows others what was written on closing.
        number = os.open(self._own, os.O_WRONLY)
        try:
            os.pwrite(number, record, 0)
        finally:
            os.close(number)

    def read(self, rank: int) -> Heartbeat | None:
        """What a rank wrote last; None if it has left, or was caught in writing."""
        try:
            return Heartbeat.from_json(self._path(rank).read_bytes())
        except (OSError, ValueError):
            return None

    def claim(self) -> bool:
        """Whether this rank is the one that reports; all others are asked to answer.

        OSError if that cannot be.
        """
        try:
            with self._hang.open("x") as file:
                file.write(self._own.name)
        except FileExistsError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether some rank reports."""
        return self._hang.exists()

    def answer(self, answer: RankAnswer) -> None:
        """Say where this rank stands. OSError if that cannot be."""
        partial = self._answer.with_suffix(".tmp")
        partial.write_text(f"{answer.heartbeat.to_json()}\n{answer.stacks}")
        partial.replace(self._answer)

    def answer_of(self, rank: int) -> RankAnswer | None:
        """What a rank said; None if it has not yet."""
        try:
            heartbeat, _, stacks = self._answer_path(rank).read_text().partition("\n")
            return RankAnswer(Heartbeat.from_json(heartbeat), stacks)
        except (OSError, ValueError):
            return None

    def leave(self) -> None:
        """This rank is watched no more; the last one takes the folder away."""
        with contextlib.suppress(OSError):
            self._own.unlink()
            self.folder.rmdir()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _answer_path(self, rank: int) -> Path:
        return self.folder / f"answer-{rank}.txt"
