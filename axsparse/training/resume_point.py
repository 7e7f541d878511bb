"""Where a run goes on from, before anything is made or changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime.files.run_lock import RunLock
from axsparse.training.checkpoint.manifest import Progress
from axsparse.training.checkpoint.verification import Checkpoint


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

    @property
    def progress(self) -> Progress | None:
        """Where training stands at this point; None at its beginning.

        In another run directory than the checkpoint's, there is no best checkpoint yet.
        """
        if self.checkpoint is None:
            return None
        progress = self.checkpoint.manifest.progress
        return progress if self.path else progress.model_copy(update={"best": None})
