"""Heartbeats: every rank's watchdog writes a small file in the run directory, for the others.

Files work without MPI, which may be what hangs, and they still exist when a rank is stopped. From
them follow the straggler of a run that hangs, and the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from axsparse.runtime.files.run_folder import RESUME_AUTO, own_files
from axsparse.runtime.grid import RankCoords

HEARTBEATS = "heartbeat"
"""The folder of the heartbeats in the run directory, which exists while the run lasts."""
RECORD_BYTES = 1024
"""The size of every record, filled up with blanks, so that one call overwrites the last one. The
stacks of a rank that makes no progress follow its record, in separate lines."""
_CLAIM = "hang"
_FILE = re.compile(rf"rank-\d+\.json|{_CLAIM}")


@dataclass(frozen=True)
class Heartbeat:
    """The activity of a rank at the time of writing."""

    written: int
    """How many heartbeats the rank has written; a rank whose number does not grow is silent."""
    quiet: float
    waits: bool
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
        if self.task in ("calibration", "writing"):  # outside of training
            return self.task
        action = f", {self.action}" if self.action else ""
        return f"{self.task} after step {self.step} ({self.phase}{action})"


class HeartbeatFolder:
    """The folder of the heartbeats, as one rank uses it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._own = self._path(rank)

    def reserve(self) -> None:
        """Take the space, so that heartbeats can be written even if the disk is full later. The
        folder exists. OSError if this rank cannot write there."""
        self._own.write_bytes(b" " * RECORD_BYTES)

    def clear(self) -> None:
        """Make the folder, or delete an earlier run's files there; one rank calls this before a
        run. Raises OSError."""
        self.folder.mkdir(exist_ok=True)
        for path in own_files(self.folder, _FILE):
            path.unlink()

    def write(self, heartbeat: Heartbeat, stacks: str = "") -> None:
        """Write this rank's heartbeat, and its stacks for a report if it makes no progress. Raises
        OSError, on a full disk once the heartbeat is written."""
        record = json.dumps(asdict(heartbeat)).encode().ljust(RECORD_BYTES - 1) + b"\n"
        text = stacks.encode(errors="replace")
        # A network file system shows other hosts what was written once the file is closed.
        self.folder.mkdir(exist_ok=True)  # another rank may just have removed it as the last one
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
            (self.folder / _CLAIM).touch(exist_ok=False)
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


SILENT = "its Python does not run"


@dataclass(frozen=True)
class RankView:
    """The state of a rank as the reporting rank knows it."""

    coords: RankCoords
    heartbeat: Heartbeat | None
    """Its last heartbeat; None if the rank has left or never began."""
    quiet: float
    is_silent: bool = False
    system: str = ""
    """The system's account of a silent rank's process, if that is on this host."""
    stacks: str = ""
    """The Python stacks of all its threads; empty if it did not answer."""


def straggler(ranks: Sequence[RankView]) -> RankView:
    """The straggler, the rank that the others wait for.

    That is a silent rank, since its Python does not run; otherwise a rank that does not wait;
    otherwise a rank that is not there. If all ranks wait, messages were lost. Among several such
    ranks, it is the one that has been quiet for longest.
    """

    def order(view: RankView) -> tuple[int, float]:
        if view.heartbeat is None:
            kind = 2
        elif view.is_silent:
            kind = 0
        else:
            kind = 3 if view.heartbeat.waits else 1
        return kind, -view.quiet

    return min(ranks, key=order)


def error_line(ranks: Sequence[RankView], report: Path | None) -> str:
    """One line on which rank hangs, who waits for it, and where the report is; None is stderr."""
    last = straggler(ranks)
    heartbeat = last.heartbeat
    if heartbeat is None:
        what = "hangs: it is not there, and all others wait"
    else:
        what = f"hangs in {heartbeat}, no progress for {last.quiet:.0f} s"
        if last.is_silent:
            what = f"hangs, last seen in {heartbeat}: {last.system or SILENT}"
        elif heartbeat.waits:
            what += ", and so do all others, waiting for each other"
    ending = f" from rank {last.coords.rank}"
    for view in ranks:
        texts = () if view.heartbeat is None else view.heartbeat.awaited
        if view.heartbeat and (text := next((t for t in texts if t.endswith(ending)), "")):
            awaited = text.removesuffix(ending)
            what += f"; rank {view.coords.rank} awaits its {awaited} in step {view.heartbeat.step}"
            break
    if report is None:
        where = "above; a"
    else:
        where = f"in {report}; {RESUME_AUTO} goes on from the last checkpoint, and a"
    return (
        f"{last.coords}: {what}; the stacks of all ranks are {where} larger watchdog.timeout waits "
        "longer"
    )


def report(ranks: Sequence[RankView], line: str) -> str:
    """The report: the error line, one line for every rank, then all stacks, the straggler's
    first."""
    first = straggler(ranks)
    others = [view for view in ranks if view is not first]
    lines = [line, "", *map(state_line, ranks)]
    for view in (first, *others):
        missing = "it did not answer" if view.heartbeat else "it is not there"
        lines += ["", f"{view.coords}:", view.stacks or f"no stacks: {missing}"]
    return "\n".join(lines).rstrip() + "\n"


def state_line(view: RankView) -> str:
    heartbeat = view.heartbeat
    if heartbeat is None:
        return f"{view.coords}: has left, or never began to train"
    how = "waits in" if heartbeat.waits else "is in"
    if view.is_silent:
        how = f"does not answer ({view.system or SILENT}), last seen in"
    awaited = f"; awaits {', '.join(heartbeat.awaited)}" if heartbeat.awaited else ""
    return (
        f"{view.coords} on {heartbeat.host}, process {heartbeat.process}: {how} {heartbeat}, "
        f"{view.quiet:.0f} s without progress{awaited}"
    )


def process_state(process: int) -> str:
    """The system's account of a process on this host, as a text; empty if it looks healthy."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "its process is gone" if Path("/proc/self/stat").exists() else ""
    return {
        "T": "its process is stopped by a signal",
        "t": "its process is stopped by a debugger",
        "D": "its process waits for a disk or a device",
        "Z": "its process has ended",
    }.get(state, "")
