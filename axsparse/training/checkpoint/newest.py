"""Finds the checkpoint of a run that is meant, and verifies the one that a run resumes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, everywhere
from axsparse.runtime.exchange import together
from axsparse.training.checkpoint.checkpoint_folder import (
    CHECKPOINTS,
    UNFINISHED,
    path_of,
    saved_steps,
    step_of,
    unfinished,
)
from axsparse.training.checkpoint.verification import Checkpoint, open_checkpoint, verify


def checkpoint_of(run: Path, step: int | Literal["best"] | None) -> Checkpoint:
    """The checkpoint that a path names: itself, or that of `step` in a run, or its newest.

    "best" is that of the lowest validation loss, as the newest one remembers it.

    ConfigError if the path is a checkpoint and a step is given, MissingInputError if there is no
    such checkpoint, and what `open_checkpoint` raises.
    """
    if step_of(run.resolve()) is not None:
        if step is not None:
            raise ConfigError(f"--step: {run} is a checkpoint already; leave --step out")
        return open_checkpoint(run)
    steps = steps_in(run)
    if not steps:
        raise MissingInputError(
            f"{run}: holds no checkpoint; name a run that has saved one, or a checkpoint"
        )
    if step == "best":
        best = open_checkpoint(path_of(run / CHECKPOINTS, steps[0])).manifest.progress.best
        if best is None:
            raise MissingInputError(
                f"{run}: its newest checkpoint knows of no best evaluation; train with "
                "checkpoint.keep_best, or name a step"
            )
        step = best.step
    if step is not None and step not in steps:
        raise MissingInputError(
            f"--step: {run} has no checkpoint of step {step}; choose one of "
            f"{', '.join(map(str, steps))}"
        )
    return open_checkpoint(path_of(run / CHECKPOINTS, steps[0] if step is None else step))


def verify_together(transport: Transport, path: Path) -> Checkpoint:
    """Open a checkpoint on every rank and verify it, a part of its files on each.

    Raises what `verify` raises, on all ranks alike.
    """
    checkpoint = together(transport, lambda: open_checkpoint(path))
    own = sorted(checkpoint.manifest.files)[transport.rank :: transport.size]
    together(transport, lambda: verify(checkpoint, own))
    return checkpoint


def newest_whole(
    transport: Transport, run_dir: Path, steps: Sequence[int]
) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each damaged one that is newer.

    `steps` are those of the run's checkpoints, newest first. The checkpoint is None if there are
    no steps; DataError on all ranks if none of the checkpoints is whole.
    """
    skipped: list[str] = []
    for step in steps:
        found = _tried(transport, path_of(run_dir / CHECKPOINTS, step))
        if isinstance(found, Checkpoint):
            return found, skipped
        skipped.append(f"passed over: {found}")
    if skipped:
        raise everywhere(
            DataError(
                f"{run_dir}: none of its {len(steps)} checkpoints is whole ({skipped[0]}); restore "
                "one, or start another run with another --run-dir"
            )
        )
    return None, skipped


def _tried(transport: Transport, path: Path) -> Checkpoint | str:
    """The checkpoint if it is whole, otherwise what is wrong with it."""
    try:
        return verify_together(transport, path)
    except (DataError, MissingInputError) as reason:
        return str(reason)


def remains(run_dir: Path) -> list[str]:
    """A line for the user for each checkpoint that a killed run did not finish."""
    return [
        f"passed over: checkpoint {path}: was not finished when the run was killed"
        for path in unfinished(run_dir / CHECKPOINTS)
        if path.suffix == UNFINISHED
    ]


def steps_in(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first."""
    return saved_steps(run_dir / CHECKPOINTS)
