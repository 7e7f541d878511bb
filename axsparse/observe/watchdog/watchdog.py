"""The watchdog: a thread of every rank that ends the run if it hangs.

A run hangs once no rank has made progress for `timeout` (docs/decisions/024). Every rank writes
heartbeats. A rank that has made no progress for half the timeout writes its stacks, too, and begins
to read the heartbeats of the others, rank 0 first. The rank that finds all ranks quiet or silent
writes a report with the stacks, and ends the job.

Time is counted in looks, so a job that was suspended on all ranks continues where it was.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from axsparse.config.schema import WatchdogConfig
from axsparse.observe.phases import Phases
from axsparse.observe.watchdog.heartbeat import (
    HEARTBEATS,
    Heartbeat,
    HeartbeatFolder,
    RankView,
    error_line,
    process_state,
    report,
    state_line,
    straggler,
)
from axsparse.runtime.communication import Backoff, Transport
from axsparse.runtime.errors import EXIT_INTERNAL, writing
from axsparse.runtime.exchange import gather_values, together
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR, RESUME_AUTO
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.process import exit_at_once, write_line

Task = Literal["training", "calibration", "evaluation", "masks", "checkpoint", "weights", "writing"]
THREAD = "axsparse watchdog"
REPORT_FILE = "hang-report.txt"
"""The report in the run directory; a later hang overwrites it."""
LOOKS = 20
"""How often a rank looks, and writes a heartbeat, in the time of one `timeout`."""
MOST_SECONDS = 30.0
SILENT_LOOKS = 10
"""A rank is silent after this many looks without a new heartbeat."""
FIRST_STEP = 5.0
"""The first step may take this many times `timeout`, since it allocates and compiles."""
ABORT_SECONDS = 10.0
"""How long MPI has to end the job; then this process exits, and the launcher ends the others."""
CLOSING_SECONDS = 5.0
"""How long the end of a run waits for a look, which a disk may hold up for ever."""


@dataclass(eq=False)
class Activity:
    """The current task of a rank, and a count that grows as long as it makes progress."""

    phases: Phases
    backoff: Backoff
    """Pauses while the rank waits for others."""
    awaited: Callable[[], Sequence[str]]
    task: Task = "training"
    step: int = 0
    """The step under way or, in a task between two steps, the number of steps done."""
    steps: int = 0
    _beats: int = 0

    def at(self, task: Task, step: int) -> None:
        self.task, self.step = task, step
        self.note_progress()

    def note_progress(self) -> None:
        """Note progress outside the phases; any thread may call this."""
        self._beats += 1

    @property
    def beats(self) -> int:
        """Grows with every piece of work; waiting and looking for messages are not work."""
        return self._beats + self.phases.worked


@dataclass(eq=False)
class Watchdog:
    """The watchdog of one rank; its threads live from `start` to `close`, which may follow each
    other several times."""

    heartbeats: HeartbeatFolder
    activity: Activity
    coords: RankCoords
    timeout: float
    """In seconds."""
    end_job: Callable[[int], Any]
    """`end_job(code)` ends the job, from any thread."""
    clock: Callable[[], float] = time.monotonic
    reworded: Callable[[str], str] = str
    """Has a line name the options of the command that runs."""

    def __post_init__(self) -> None:
        self.report: Path | None = self.heartbeats.folder.parent / REPORT_FILE
        """The file of the report, in the run directory; None of a quiet run prints it."""
        self.interval = min(self.timeout / LOOKS, MOST_SECONDS)
        self._time = 0.0
        self._looked_at = self.clock()
        self._beats = self.activity.beats
        self._progress_at = 0.0
        self._pauses = self.activity.backoff.pauses
        self._written = 0
        self._watched: dict[int, tuple[Heartbeat | None, float]] = {}
        """The last heartbeat of each other rank since this one began to look at it, and the time
        when this heartbeat was first seen."""
        self._found_at: float | None = None
        """When this rank found a hang that another rank reports."""
        self._last_state = (0, 0)
        self._unchanged_seconds = 0.0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Watch from now on, with a first heartbeat at once; a second call has no effect."""
        if self._threads:
            return
        self._closed.clear()
        self._looked_at, self._progress_at, self._unchanged_seconds = self.clock(), self._time, 0.0
        with suppress(OSError):  # as in `look`
            self.heartbeats.write(self._heartbeat())
        for work in (self.look, self.check_looks):
            thread = threading.Thread(
                target=self._repeat, args=(work,), name=f"{THREAD} {work.__name__}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        self._closed.set()
        while self._threads:
            self._threads.pop().join(CLOSING_SECONDS)
        self.heartbeats.remove_own()

    def look(self) -> None:
        """Every `interval`: write a heartbeat, and look at the other ranks if this one is quiet."""
        own = self._heartbeat()
        # A disk may fail for a while. The others then take this rank for silent, and that alone
        # does not end the run. On a full disk, a report has fewer stacks.
        with suppress(OSError):
            self.heartbeats.write(own, stacks() if own.quiet >= self.timeout / 2 else "")
        if own.quiet < self.timeout / 2 + self.coords.rank * self.interval:
            self._watched.clear()
            self._found_at = None
            return
        ranks = [self._view(rank, own) for rank in range(self.coords.grid.size)]
        if all(rank.is_silent or rank.quiet >= self._patience for rank in ranks):
            self._report_hang(own, ranks)

    def check_looks(self) -> None:
        """End the job if neither `look` nor training gets on; a second thread calls this every
        `interval`, since a disk that hangs may hold up both."""
        state = (self._written, self.activity.beats)
        self._unchanged_seconds = (
            self._unchanged_seconds + self.interval if state == self._last_state else 0.0
        )
        self._last_state = state
        if self._unchanged_seconds >= 2 * self._patience:
            self._end(
                f"{self.coords}: hangs, and so does the disk of {self.heartbeats.folder.parent}, "
                f"where it would be reported; {RESUME_AUTO} goes on from the last checkpoint"
            )

    @property
    def _patience(self) -> float:
        return self.timeout * (1.0 if self.activity.steps else FIRST_STEP)

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._closed.wait(self.interval):
            work()

    def _heartbeat(self) -> Heartbeat:
        now, activity = self.clock(), self.activity
        # If more time has passed, this process or the job was stopped meanwhile.
        self._time += min(now - self._looked_at, 2 * self.interval)
        self._looked_at = now
        beats, pauses = activity.beats, activity.backoff.pauses
        if beats != self._beats:
            self._beats, self._progress_at = beats, self._time
        waits, self._pauses = pauses != self._pauses, pauses
        self._written += 1
        return Heartbeat(
            written=self._written,
            quiet=self._time - self._progress_at,
            waits=waits,
            task=activity.task,
            step=activity.step,
            phase=activity.phases.current,
            action=activity.phases.action,
            awaited=tuple(activity.awaited()),
            host=socket.gethostname(),
            process=os.getpid(),
        )

    def _view(self, rank: int, own: Heartbeat) -> RankView:
        coords = self.coords.grid.coords(rank)
        if rank == self.coords.rank:
            return RankView(coords, own, own.quiet)
        beat = self.heartbeats.read(rank)
        heartbeat, since = self._watched.get(rank, (None, self._time))
        if beat is not None and (heartbeat is None or beat.written != heartbeat.written):
            heartbeat, since = beat, self._time
        self._watched[rank] = heartbeat, since
        passed = self._time - since
        is_silent = passed >= SILENT_LOOKS * self.interval
        is_here = heartbeat is not None and heartbeat.host == own.host
        return RankView(
            coords,
            heartbeat,
            passed if heartbeat is None else heartbeat.quiet + passed,
            is_silent=is_silent,
            system=process_state(heartbeat.process) if heartbeat and is_here and is_silent else "",
        )

    # -- once the run hangs ---------------------------------------------------------------

    def _report_hang(self, own: Heartbeat, ranks: Sequence[RankView]) -> None:
        try:
            is_first = self._found_at is None and self.heartbeats.claim()
        except OSError:  # on a full disk, each rank that finds the hang reports what it knows
            is_first = True
        if not is_first:
            if self._found_at is None:
                self._found_at = self._time
            elif self._time - self._found_at >= self.timeout:
                self._end(f"{self.coords}: hangs in {own}, and no rank reports it")
            return
        ranks = [
            replace(
                view,
                stacks=stacks() if rank == self.coords.rank else self.heartbeats.stacks_of(rank),
            )
            for rank, view in enumerate(ranks)
        ]
        line = self.reworded(error_line(ranks, self.report))
        text = report(ranks, line)
        try:
            if self.report is None:
                raise FileNotFoundError
            self.report.write_text(text, encoding="utf-8", errors="replace")
        except OSError:
            said = text.partition("\n")[2]
        else:
            first = straggler(ranks).stacks
            said = "\n".join([*map(state_line, ranks), *([first] if first else [])])
        sys.stderr.write(said.rstrip() + "\n")
        self._end(line)

    def _end(self, line: str) -> None:
        write_line(f"error: {self.reworded(line)}")
        # If MPI itself hangs, `end_job` does not return.
        timer = threading.Timer(ABORT_SECONDS, exit_at_once, (EXIT_INTERNAL,))
        timer.daemon = True
        timer.start()
        self.end_job(EXIT_INTERNAL)


def open_watchdog(
    settings: WatchdogConfig,
    run_dir: Path | None,
    *,
    coords: RankCoords,
    activity: Activity,
    transport: Transport,
    reworded: Callable[[str], str] = str,
) -> Watchdog | None:
    """The watchdog of this rank, not yet started; None if `watchdog.timeout` is 0.

    All ranks call this together. Raises OutputError on all ranks alike. Without a run directory the
    ranks meet in the temporary folder of their host; None if they have several hosts.
    """
    if settings.timeout == 0:
        return None
    if run_dir is None:
        said = gather_values(transport, [socket.gethostname(), uuid.uuid4().hex])
        if len({host for host, _ in said}) > 1:
            return None
        folder = Path(tempfile.gettempdir()) / f"axsparse-{said[0][1]}"
    else:
        folder = run_dir / HEARTBEATS
    heartbeats = HeartbeatFolder(folder, coords.rank)
    watchdog = Watchdog(
        heartbeats, activity, coords, settings.timeout, transport.abort, reworded=reworded
    )
    if run_dir is None:
        watchdog.report = None
        return watchdog

    def prepare(work: Callable[[], None]) -> None:
        with writing(f"{folder}:", f"choose {ANOTHER_RUN_DIR}, or set watchdog.timeout to 0"):
            work()

    together(transport, lambda: prepare(heartbeats.clear) if transport.rank == 0 else None)
    together(transport, lambda: prepare(heartbeats.reserve))
    return watchdog


@contextmanager
def watched(
    task: Task,
    settings: WatchdogConfig,
    folder: Path | None,
    *,
    coords: RankCoords,
    transport: Transport,
    reworded: Callable[[str], str] = str,
) -> Iterator[Callable[[], None]]:
    """A watchdog around a task outside of training, which ends the job if no rank gets on.

    All ranks do the task together. The yielded function notes progress. Heartbeats and the report
    are in the folder, as in a training's run directory. Raises OutputError on all ranks alike.
    """
    activity = Activity(Phases(), transport.backoff, lambda: (), task=task)
    watchdog = open_watchdog(
        *(settings, folder),
        coords=coords,
        activity=activity,
        transport=transport,
        reworded=reworded,
    )
    if watchdog is not None:
        watchdog.start()
    try:
        yield activity.note_progress
    finally:
        if watchdog is not None:
            watchdog.close()


def stacks() -> str:
    """The Python stacks of the other threads of this process, the main one first."""
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    frames = sys._current_frames()
    lines = []
    for thread in threads:
        if thread.ident in frames and not thread.name.startswith(THREAD):
            summary = traceback.extract_stack(frames[thread.ident])
            # The first frames, in which a thread begins, are the same for all threads.
            while len(summary) > 1 and summary[0].filename == threading.__file__:
                del summary[0]
            lines += [f"thread {thread.name}:", "".join(summary.format()).rstrip()]
    return "\n".join(lines)
