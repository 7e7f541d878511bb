"""Finds the straggler of a run that hangs, and writes the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.observe.watchdog.heartbeat import Heartbeat
from axsparse.runtime.grid import RankCoords

SILENT = "its Python does not run"


@dataclass(frozen=True)
class RankView:
    """The state of a rank as the reporting rank knows it."""

    coords: RankCoords
    heartbeat: Heartbeat | None
    """Its last heartbeat; None if the rank has left or never began."""
    quiet: float
    """Seconds without progress."""
    is_silent: bool = False
    """Whether it has stopped writing heartbeats."""
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
    what += "".join(f"; {text}" for text in _awaiting(ranks, last)[:1])
    if report is None:
        where = "above; a"
    else:
        where = f"in {report}; --resume auto goes on from the last checkpoint, and a"
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
        lines += ["", f"{view.coords}:", view.stacks or _no_stacks(view)]
    return "\n".join(lines).rstrip() + "\n"


def state_line(view: RankView) -> str:
    """One line on the current task of a rank."""
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


def _awaiting(ranks: Sequence[RankView], found: RankView) -> list[str]:
    """One text for every rank that waits for a message from this one."""
    ending = f" from rank {found.coords.rank}"
    return [
        f"rank {view.coords.rank} awaits its {text.removesuffix(ending)} in step {beat.step}"
        for view in ranks
        if (beat := view.heartbeat) is not None
        for text in beat.awaited
        if text.endswith(ending)
    ]


def _no_stacks(view: RankView) -> str:
    return "no stacks: it did not answer" if view.heartbeat else "no stacks: it is not there"
