"""Heartbeats: every rank's watchdog writes a small file in the run directory, for the others.

Files work without MPI, which may be what hangs, and they still exist when a rank is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from axsparse.runtime.files.atomic import new_path

HEARTBEATS = "heartbeat"
"""The folder of the heartbeats in the run directory, which exists while the run lasts."""
RECORD_BYTES = 1024
"""The size of every record, filled up with blanks, so that one call overwrites the last one."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank was doing when it wrote this."""

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
        """As in "compute (F3) of step 25", or "checkpoint after step 25 (collective)"."""
        if self.task == "training":
            action = f" ({self.action})" if self.action else ""
            return f"{self.phase}{action} of step {self.step}"
        action = f", {self.action}" if self.action else ""
        return f"{self.task} after step {self.step} ({self.phase}{action})"

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        """The heartbeat in a text; ValueError if there is none."""
        found = json.loads(text)
        names = {field.name for field in fields(Heartbeat)}
        if not isinstance(found, Mapping) or set(found) != names:
            raise ValueError("no heartbeat")
        values: dict[str, Any] = {**found, "awaited": tuple(found["awaited"])}
        return Heartbeat(**values)


@dataclass(frozen=True)
class RankAnswer:
    """The answer of a rank to the one that reports a hang."""

    heartbeat: Heartbeat
    stacks: str
    """The stacks of all its Python threads."""


class HeartbeatFolder:
    """The folder of the heartbeats, as one rank uses it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` exists. OSError if this rank cannot write there."""
        self.folder = folder
        self._own = self._path(rank)
        self._answer = self._answer_path(rank)
        self._hang = folder / "hang"
        # Takes the space now, so that heartbeats can be written even if the disk is full later.
        self._own.write_bytes(b" " * RECORD_BYTES)

    @staticmethod
    def clear(folder: Path) -> None:
        """Make the folder, or empty it; one rank calls this before a run. Raises OSError."""
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()

    def write(self, heartbeat: Heartbeat) -> None:
        """Write this rank's heartbeat. Raises OSError."""
        record = heartbeat.to_json().encode().ljust(RECORD_BYTES)
        # A network file system shows other hosts what was written once the file is closed.
        number = os.open(self._own, os.O_WRONLY)
        try:
            os.pwrite(number, record, 0)
        finally:
            os.close(number)

    def read(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank; None if it has left, or is just writing."""
        try:
            return Heartbeat.from_json(self._path(rank).read_bytes())
        except (OSError, ValueError):
            return None

    def claim(self) -> bool:
        """Ask all ranks to answer, and say whether this rank is the one to report.

        Raises OSError.
        """
        try:
            with self._hang.open("x") as file:
                file.write(self._own.name)
        except FileExistsError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether any rank reports."""
        return self._hang.exists()

    def answer(self, answer: RankAnswer) -> None:
        """Write this rank's answer. Raises OSError."""
        text = f"{answer.heartbeat.to_json()}\n{answer.stacks}"
        with new_path(self._answer, durable=False) as unfinished:
            unfinished.write_text(text, encoding="utf-8", errors="replace")

    def answer_of(self, rank: int) -> RankAnswer | None:
        """The answer of a rank; None if it has not answered yet."""
        try:
            heartbeat, _, stacks = self._answer_path(rank).read_text("utf-8").partition("\n")
            return RankAnswer(Heartbeat.from_json(heartbeat), stacks)
        except (OSError, ValueError):
            return None

    def remove_own(self) -> None:
        """Take this rank's heartbeat away; the last rank removes the folder."""
        with contextlib.suppress(OSError):
            self._own.unlink()
            self.folder.rmdir()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _answer_path(self, rank: int) -> Path:
        return self.folder / f"answer-{rank}.txt"
