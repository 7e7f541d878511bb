"""`axsparse compare`: whether two runs are the same, and where they first part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, say
from axsparse.config.section import counted
from axsparse.runtime.errors import AxsparseError, MissingInputError, reading
from axsparse.runtime.process import exit_process

if TYPE_CHECKING:
    from axsparse.training.checkpoint.verification import Checkpoint

DESCRIPTION = """\
Say whether two runs are the same, bit by bit, and if not, at which step and layer they first part.
RUN is a run directory:

  axsparse compare runs/one runs/other

The losses and norms of the steps that both have recorded are compared, the evaluations, and the
checkpoints that both still have (axsparse report shows the settings that differ). Two runs of one
configuration are the same under any number of stages, and with samo.gradient exact under any number
of replicas (docs/explanation/bitwise.md).

exit codes, beside those of every command:
  0 the same, as far as both go   1 they differ
"""
DIGEST = "weights_digest"
RECORDED = (DIGEST, "loss", "grad_norm", "loss_scale", "skipped", "eval_loss")
"""The fields of records that follow from the arithmetic of a run, and not from its time."""


def parser() -> CommandParser:
    arguments = CommandParser(_compare, prog="axsparse compare", description=DESCRIPTION)
    arguments.add_argument("runs", metavar="RUN", type=Path, nargs=2)
    return arguments


def _compare(arguments: argparse.Namespace) -> None:
    one, other = arguments.runs
    recorded, parted = _records(one, other)
    saved, apart = _checkpoints(one, other)
    if not recorded and not saved:
        raise MissingInputError(
            f"compare: {one} and {other} have no step and no checkpoint in common; name two runs "
            "that have"
        )
    what = f"{counted(recorded, 'record')} and {counted(len(saved), 'checkpoint')}"
    if saved:
        what += f" ({'step' if len(saved) == 1 else 'steps'} {', '.join(map(str, saved))})"
    for line in filter(None, (parted, apart)):
        say(line)
    if parted or apart:
        exit_process(1)
    say(f"the same: {what}")


def _records(one: Path, other: Path) -> tuple[int, str]:
    """How many records both have, and the first field that differs; empty if none does."""
    from axsparse.observe.run_report import read_records, step_of
    from axsparse.runtime.files.run_folder import METRICS_FILE

    mine, theirs = (read_records(run / METRICS_FILE) for run in (one, other))
    number, parted = 0, dict[float, str]()
    for kind in ("steps", "evaluations"):
        # Of a step that was done again after a resumption, the later record counts.
        left, right = ({step_of(r): r for r in getattr(run, kind)} for run in (mine, theirs))
        for step in sorted(left.keys() & right.keys()):
            number += 1
            for field in RECORDED:
                values = left[step].get(field), right[step].get(field)
                # A run may be configured to hash its weights more often than the other.
                is_comparable = field != DIGEST or None not in values
                if values[0] != values[1] and is_comparable:
                    text = f"step {step:.0f}: {field} is {values[0]!r} and {values[1]!r}"
                    parted.setdefault(step, text)
    return number, parted[min(parted)] if parted else ""


def _checkpoints(one: Path, other: Path) -> tuple[list[int], str]:
    """The steps of the checkpoints that both have, and where the first that differs does; says why
    others cannot be compared."""
    from axsparse.training.checkpoint import checkpoint_folder, verification

    folders = [run / checkpoint_folder.CHECKPOINTS for run in (one, other)]
    steps = []
    for folder in folders:
        with reading(f"compare: {folder}", "name a run that you may read"):
            steps.append(set(checkpoint_folder.saved_steps(folder)))
    both, first = list[int](), ""
    for step in sorted(steps[0] & steps[1]):
        try:
            opened = [
                verification.open_checkpoint(checkpoint_folder.path_of(folder, step))
                for folder in folders
            ]
        except AxsparseError as reason:
            say(f"left out: {str(reason).partition('; ')[0]}")
            continue
        both.append(step)
        if not first and (difference := next(_differences(*opened), "")):
            first = f"checkpoint of step {step}: {difference}"
    return both, first


def _differences(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """The differences between two checkpoints, in the order of the model."""
    mine, theirs = one.manifest, other.manifest
    if [*mine.layers] != [*theirs.layers]:
        yield "they are of different models"
        return
    # A checkpoint at the end of a run is written after the work between two steps.
    progress = [
        manifest.progress.model_dump(exclude={"evaluated", "masked"}) for manifest in (mine, theirs)
    ]
    for field, value in progress[0].items():
        if value != progress[1][field]:
            yield f"progress.{field} is {value} and {progress[1][field]}"
    for name, layer in mine.layers.items():
        if layer != theirs.layers[name]:
            yield f"layer {name} keeps other entries"
        # The manifest has a hash of every file, so that none is read.
        for file in filter(None, (layer.file, layer.pruner)):
            if mine.files[file] != theirs.files.get(file):
                yield f"{file} of layer {name} differs"
