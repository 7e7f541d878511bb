"""Of a run that hangs: which rank the others wait for, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.observe.watchdog.heartbeat import Heartbeat
from axsparse.runtime.grid import Place

SILENT = "its Python does not run"


@dataclass(frozen=True)
class RankView:
    """One rank, as the one that reports sees it."""

    place: Place
    heartbeat: Heartbeat | None
    """The last one; None if it has none: it has left, or never began."""
    quiet: float
    """Seconds without progress."""
    is_silent: bool = False
    """Whether it writes no heartbeats any more."""
    system: str = ""
    """What the system says of the process of a silent rank, if it is on this host."""
    stacks: str | None = None
    """Python stacks of all its threads; None if it did not answer."""


def laggard(ranks: Sequence[RankView]) -> RankView:
    """The rank that others wait for.

    First one that does not answer, since its own Python does not run; then one that does not
    wait; then one that is not there. If all wait, messages are lost, and it is the first that
    stalled. Of several alike also the first that stalled.
    """

    def order(seen: RankView) -> tuple[int, float]:
        if seen.heartbeat is None:
            kind = 2
        elif seen.is_silent:
            kind = 0
        else:
            kind = 3 if seen.heartbeat.waits else 1
        return kind, -seen.quiet

    return min(ranks, key=order)


def error_line(ranks: Sequence[RankView], report: Path) -> str:
    """What hangs, for whom, and where all else is told."""
    found = laggard(ranks)
    heartbeat = found.heartbeat
    if heartbeat is None:
        what = "hangs: it is not there, and all others wait"
    else:
        what = f"hangs in {heartbeat}, no progress for {found.quiet:.0f} s"
        if found.is_silent:
            what = f"hangs, last seen in {heartbeat}: {found.system or SILENT}"
        elif heartbeat.waits:
            what += ", and so do all others, waiting for each other"
    what += "".join(f"; {text}" for text in _awaiting(ranks, found)[:1])
    return (
        f"{found.place}: {what}; the stacks of all ranks are in {report}; --resume auto goes on "
        "from the last checkpoint, and a larger watchdog.timeout waits longer"
    )


def report(ranks: Sequence[RankView], line: str) -> str:
    """The error line, every rank on a line, then the stacks of each, the laggard's first."""
    first = laggard(ranks)
    others = [seen for seen in ranks if seen is not first]
    lines = [line, "", *map(state_line, ranks)]
    for seen in (first, *others):
        lines += ["", f"{seen.place}:", seen.stacks or _no_stacks(seen)]
    return "\n".join(lines).rstrip() + "\n"


def state_line(seen: RankView) -> str:
    """One rank on one line."""
    heartbeat = seen.heartbeat
    if heartbeat is None:
        return f"{seen.place}: has left, or never began to train"
    how = "waits in" if heartbeat.waits else "is in"
    if seen.is_silent:
        how = f"does not answer ({seen.system or SILENT}), last seen in"
    awaited = f"; awaits {', '.join(heartbeat.awaited)}" if heartbeat.awaited else ""
    return (
        f"{seen.place} on {heartbeat.host}, process {heartbeat.process}: {how} {heartbeat}, "
        f"{seen.quiet:.0f} s without progress{awaited}"
    )


def process_state(process: int) -> str:
    """What the system says of a process of this host that does not answer."""
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
    """Who waits for which message of a rank."""
    ending = f" from rank {found.place.rank}"
    return [
        f"rank {seen.place.rank} awaits its {text.removesuffix(ending)} in step {beat.step}"
        for seen in ranks
        if (beat := seen.heartbeat) is not None
        for text in beat.awaited
        if text.endswith(ending)
    ]


def _no_stacks(seen: RankView) -> str:
    return "no stacks: it did not answer" if seen.heartbeat else "no stacks: it is not there"
