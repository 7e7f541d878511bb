"""Where a run goes on from, before anything is made or changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime.files.run_lock import RunLock
from axsparse.training.checkpoint.manifest import Progress
from axsparse.training.checkpoint.verification import Checkpoint
from axsparse.training.spikes import RewindOrder, without_base


@dataclass(frozen=True)
class ResumePoint:
    """The run directory and the checkpoint that a run goes on from, if it has any."""

    path: Path | None = None
    """The directory of the run; None makes a new one."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that all ranks have verified; None starts from the beginning."""
    notes: tuple[str, ...] = ()
    """Lines that tell the user what was found and chosen."""
    lock: RunLock | None = None
    """Keeps other jobs out of `path`; None on ranks other than 0, and without a directory."""
    order: RewindOrder | None = None
    """The spike of the loss that sent the run back to the checkpoint; None if none did."""

    @property
    def progress(self) -> Progress | None:
        """Where training stands at this point; None at its beginning."""
        if self.checkpoint is None:
            return None
        progress = self.checkpoint.manifest.progress
        if self.path is None:
            return without_base(progress)
        return progress if self.order is None else self.order.applied(progress)
