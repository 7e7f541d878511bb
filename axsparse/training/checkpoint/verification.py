"""Opens the named checkpoint, and checks that its files are as they were written, and that a run
may be resumed from it, which needs the same model, data and settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsInt

import xxhash

from axsparse.config.hf_config import CONFIG_FILE
from axsparse.config.messages import shorten
from axsparse.config.schema import ONCE, Config
from axsparse.config.section import flat
from axsparse.models.model_profile import ModelProfile
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    DataError,
    MissingInputError,
    check_kind,
    everywhere,
    printable,
    reading,
)
from axsparse.runtime.exchange import together
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR, RunMark, has_mark
from axsparse.training.checkpoint.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST_FILE,
    UNFINISHED,
    CheckpointManifest,
    DataEntry,
    FileEntry,
    away,
    open_plain,
    path_of,
    read_manifest,
    run_of,
    saved_steps,
    step_of,
    unfinished,
)

PIECE = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, but not its files."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Number of steps done when it was saved."""
        return self.manifest.progress.step


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint; MissingInputError without a manifest, DataError if that is damaged."""
    manifest = read_manifest(path)
    named = step_of(path)
    if named is not None and named != manifest.progress.step:
        raise DataError(
            f"checkpoint {path}: was saved after step {manifest.progress.step}; give it its name "
            "back"
        )
    return Checkpoint(path, manifest)


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Read the named files, or all, and compare them with the manifest.

    MissingInputError for one that cannot be read, DataError for one that has changed.
    """
    entries = checkpoint.manifest.files
    for name in entries if names is None else names:
        written = entries[name]
        entry = read_entry(checkpoint.path, name, written.bytes)
        if entry != written:
            what = "another hash than its manifest says"
            if entry.bytes != written.bytes:
                what = f"{entry.bytes} bytes, its manifest says {written.bytes}"
            where = f"checkpoint {checkpoint.path}: {name}"
            raise DataError(f"{where} has {what}; take another one")


def read_entry(folder: Path, name: str, expected: int | None = None) -> FileEntry:
    """The size and hash of a file on the disk; MissingInputError if it cannot be read.

    A file of another size than `expected` is not read: its hash is the hash of no bytes.
    """
    digest = xxhash.xxh3_128()
    with (
        reading(f"checkpoint {folder}: {name}", "take another one"),
        open_plain(folder / name) as file,
    ):
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected:
            return FileEntry(bytes=size, xxh3=digest.hexdigest())
        while piece := file.read(PIECE):
            digest.update(piece)
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint are as they were written."""
    try:
        verify(open_checkpoint(path))
    except AxsparseError:
        return False
    return True


def checkpoint_of(run: Path, step: int | Literal["best"] | None) -> Checkpoint:
    """The checkpoint that a path names: itself, or the one of `step` in a run, or its newest. The
    folder of a run's checkpoints means the run.

    "best" has the lowest validation loss, as the newest one remembers it.

    ConfigError if the path is a checkpoint and a step is given, or for a step of another kind,
    MissingInputError if there is no such checkpoint, and the errors of `open_checkpoint`.
    """
    if step != "best":
        check_kind("step", step, SupportsInt | None, 'give a whole number, "best", or leave it out')
    with reading(f"{run}:", "name a run that has saved a checkpoint, or a checkpoint"):
        named = run.resolve()
        is_checkpoint = (named / MANIFEST_FILE).is_file()
        is_checkpoint |= step_of(named) is not None and not has_mark(named)
        steps = [] if is_checkpoint else steps_in(run_of(run))
    if is_checkpoint:
        if step is not None:
            raise ConfigError(f"--step: {run} is a checkpoint already; leave --step out")
        return open_checkpoint(run)
    run = run_of(run)
    if not steps:
        if has_mark(run) and RunMark.of(run).has_saved:
            raise MissingInputError(f"{without_saved(run)}, or name another run")
        if (run / CONFIG_FILE).is_file():
            raise MissingInputError(
                f"{run}: is a Hugging Face folder, no run; begin a run from it by model.from, "
                "which train.eval_first evaluates, or name another run"
            )
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
    return open_checkpoint(path_of(run / CHECKPOINTS, steps[0] if step is None else int(step)))


def without_saved(run_dir: Path) -> str:
    """The line about a run that has saved checkpoints and has none any more, but for its end."""
    folder = run_dir / CHECKPOINTS
    return f"{run_dir} has saved checkpoints, and {folder} has none; mount or restore them"


def verify_together(transport: Transport, path: Path) -> Checkpoint:
    """Open a checkpoint on every rank and verify it, a part of its files on each.

    Raises what `verify` raises, on all ranks alike.
    """
    checkpoint = together(transport, lambda: open_checkpoint(path))
    part = sorted(checkpoint.manifest.files)[transport.rank :: transport.size]
    together(transport, lambda: verify(checkpoint, part))
    return checkpoint


def newest_complete(
    transport: Transport, run_dir: Path, steps: Sequence[int]
) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and a line for each damaged one that is newer.

    `steps` are the steps of the run's checkpoints, newest first. The checkpoint is None if there
    are no steps; DataError on all ranks if none of the checkpoints is complete.
    """
    skipped: list[str] = []
    for step in steps:
        try:
            return verify_together(transport, path_of(run_dir / CHECKPOINTS, step)), skipped
        except (DataError, MissingInputError) as reason:  # noqa: PERF203
            skipped.append(f"passed over: {reason}")
    if skipped:
        raise everywhere(
            DataError(
                f"{run_dir}: none of its {len(steps)} checkpoints is whole ({skipped[0]}); restore "
                f"one, or start another run with {ANOTHER_RUN_DIR}"
            )
        )
    return None, skipped


def remains(run_dir: Path) -> list[str]:
    """A line for the user for each checkpoint that a run did not finish, or that is away."""
    folder, said = run_dir / CHECKPOINTS, "passed over: checkpoint"
    begun = [path for path in unfinished(folder) if path.suffix == UNFINISHED]
    return [
        *(f"{said} {path}: was not finished" for path in begun),
        *(f"{said} {path}: is a link to {path.readlink()}, which is away" for path in away(folder)),
    ]


def steps_in(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first."""
    return saved_steps(run_dir / CHECKPOINTS)


# -- whether a run may be resumed from it --------------------------------------------------------

MEANS = (
    *("layout.", "pipeline.", "checkpoint.", "transport", "run_dir", "data.path"),
    *("train.log_every", "train.peak_flops", "train.trace"),
    *("train.compare_replicas_every", "train.check_layers", "watchdog.", "logging."),
    *("samo.index", "samo.weights", "samo.zero_stage", "samo.offload"),
    "samo.sparse_products",
)
"""Beginnings of keys that say where and how a run computes: at most, the order of sums."""
FREE = (
    *(*MEANS, "data.blend", "data.validation", "train.steps", "train.eval_"),
    "pruning.calibration_samples",
)
"""Keys, or prefixes of keys, whose values may change in a resumed run."""
PRINTED = (
    *("optimizer.learning_rate", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay"),
    *("optimizer.clip_norm", "optimizer.nesterov", "schedule.", "loss_scale.", "train.threads"),
    *("samo.gradient", "pruning.rewarm_steps"),
)
"""Keys that may change and are printed if they do, since later steps then compute other values."""
START = ("model.from", "model.weights", "model.new", "train.teacher")
"""Keys of the first weights, which a checkpoint replaces by its own, and of the teacher, whose
weights are compared; changes are printed."""


def reject_other_model(checkpoint: Checkpoint, profile: ModelProfile) -> None:
    """DataError if the parameters or layers of the model differ from the checkpoint's."""
    there = {
        name: entry.shape
        for layer in checkpoint.manifest.layers.values()
        for name, entry in layer.parameters.items()
    }
    here = {
        parameter.name: parameter.shape
        for layer in profile.layers
        for parameter in layer.parameters
        if parameter.name not in profile.ties
    }
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise DataError(
                f"checkpoint {checkpoint.path}: {name}: {_shape(there.get(name))} was saved, the "
                f"model has {_shape(here.get(name))}; set the model's settings back, or start "
                "another run"
            )
    layers = [layer.name for layer in profile.layers]
    if layers != list(checkpoint.manifest.layers):
        raise DataError(
            f"checkpoint {checkpoint.path}: its layers are {', '.join(checkpoint.manifest.layers)}"
            f", the model's are {', '.join(layers)}; start another run"
        )


def reject_other_data(checkpoint: Checkpoint, data: DataEntry, way: str) -> None:
    """DataError if the training data differ from the checkpoint's; their path may differ. `way` is
    what else there is to do."""
    there = checkpoint.manifest.data
    for what in ("samples", "fingerprint"):
        if getattr(there, what) != getattr(data, what):
            raise DataError(
                f"data: {data.name} has {what} {getattr(data, what)}, checkpoint {checkpoint.path} "
                f"was trained on {what} {getattr(there, what)}; give the run its data back, or "
                f"{way}"
            )


def reject_other_teacher(checkpoint: Checkpoint, teacher: str | None) -> None:
    """DataError if the teacher's weights differ from the checkpoint's; their path may differ."""
    if teacher is not None and teacher != checkpoint.manifest.teacher:
        raise DataError(
            f"train.teacher: its weights are not those by which checkpoint {checkpoint.path} was "
            "trained; give the run its teacher back, or start another run"
        )


def reject_other_settings(checkpoint: Checkpoint, config: Config, loaded: Config) -> list[str]:
    """A line for each setting that has changed and that the user should know of.

    ConfigError for the first changed setting that must not change.
    """
    there, here = flat(checkpoint.manifest.config), flat(config.model_dump(mode="json"))
    free: tuple[str, ...] = FREE
    if config.pruning.method in ONCE:
        free += ("pruning.until_step", "pruning.interval")
    lines = []
    for key, new in here.items():
        old = there.get(key)
        is_printed = key.startswith(PRINTED) or (key in START and None not in (old, new))
        if old == new or (key.startswith(free) and not is_printed):
            continue
        if isinstance(new, dict) and isinstance(old, dict):  # the settings of a folder
            same = [name for name, value in new.items() if old.get(name) == value]
            new, old = ({k: v for k, v in one.items() if k not in same} for one in (new, old))
        if not is_printed:
            raise ConfigError(
                f"{loaded.where(key)}: {_short(new)}, but checkpoint {checkpoint.path} was saved "
                f"with {_short(old)}; set it back, or start another run"
            )
        lines.append(f"{key} is now {_short(new)}, before it was {_short(old)}")
    return lines


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(shape)


def _short(value: object) -> str:
    return shorten(printable(repr(value)))
