"""The directory of a run: a new one, or that of a run that is gone on with."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from axsparse.config.load import LoadedConfig, to_yaml
from axsparse.config.schema import Config
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, MissingInputError, OutputError
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.files.run_lock import RunLock
from axsparse.runtime.provenance import git_hash, versions
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of, remove, step_of
from axsparse.training.checkpoint.manifest import Progress
from axsparse.training.checkpoint.newest import newest_whole, remains, steps_in, verify_together
from axsparse.training.checkpoint.verification import Checkpoint
from axsparse.training.resume_point import ResumePoint
from axsparse.training.spikes import RewindOrder

AUTO = "auto"
"""As `resume`: the newest whole checkpoint of the run, if there is one."""


@dataclass(frozen=True)
class RunDir:
    """Where a run writes, and where it goes on from."""

    path: Path
    checkpoint: Checkpoint | None
    """None: from the start."""
    notes: tuple[str, ...]
    """What the user should know of the choice."""
    lock: RunLock | None
    """On rank 0."""

    def begin(self, config: Config, progress: Progress | None, *, is_back: bool) -> None:
        """On rank 0: write the configuration, and take back what was recorded after the run stood
        there, and what it saved, if it goes back. OutputError if that cannot be."""
        save_config(config.model_copy(update={"run_dir": str(self.path)}), self.path)
        metrics, checkpoints = self.path / METRICS_FILE, self.path / CHECKPOINTS
        try:
            checkpoints.mkdir(exist_ok=True, mode=0o700)
            for step in steps_in(self.path):
                if is_back and progress is not None and step > progress.step:
                    remove(path_of(checkpoints, step))
            rewind_metrics(metrics, progress)
        except OSError as reason:
            raise OutputError(
                f"{metrics}: cannot be written ({reason.strerror}); choose another --run-dir"
            ) from reason


def find_run(
    loaded: LoadedConfig,
    transport: Transport,
    resume: str | None,
    order: RewindOrder | None = None,
) -> ResumePoint:
    """The run's directory if there is one, held by rank 0, and its checkpoint, which all ranks
    have verified.

    `resume` is None (a new run), `AUTO`, or the path of a checkpoint or of a run. After a spike
    of the loss, `order` says which checkpoint is the last that counts. All ranks call this
    together; raises on all alike.
    """
    upto = None if order is None else order.base
    held: list[RunLock] = []

    def find() -> str:
        if transport.rank != 0:
            return ""
        path, named = _locate(loaded, resume)
        if path is not None:
            held.append(RunLock(path))
        if named is not None:
            if path is not None:
                _refuse_older(path, named)
            return json.dumps([path and str(path), str(named), [], []])
        if path is None:
            return json.dumps([None, None, [], []])
        steps = [step for step in steps_in(path) if upto is None or step <= upto]
        if upto is not None and not steps:
            raise MissingInputError(
                f"{path}: its checkpoint step-{upto}, to go back to after a spike of the loss, is "
                "gone; --resume auto goes on from a later one"
            )
        return json.dumps([str(path), None, steps, remains(path)])

    try:
        found = together(transport, find)
        told = gather_texts(transport.world, transport.backoff, found)[0]
        path, named, steps, notes = json.loads(told)
        checkpoint: Checkpoint | None = None
        if named is not None:
            checkpoint = verify_together(transport, Path(named))
        elif path is not None:
            checkpoint, skipped = newest_whole(transport, Path(path), steps)
            notes = [*notes, *skipped]
    except BaseException:
        for lock in held:
            lock.release()
        raise
    if checkpoint is not None:
        all_steps = loaded.config.train.steps
        left = "" if checkpoint.step < all_steps else f"; train.steps {all_steps} asks for no more"
        notes = [*notes, f"goes on from {checkpoint.path}, after step {checkpoint.step}{left}"]
    elif path is not None:
        notes = [*notes, f"{path} has no checkpoint; starts from the beginning"]
    elif resume is not None:
        notes = [*notes, "there is no run to go on with; starts from the beginning"]
    there = None if path is None else Path(path)
    return ResumePoint(there, checkpoint, tuple(notes), held[0] if held else None, order)


def open_run_dir(loaded: LoadedConfig, transport: Transport, found: ResumePoint) -> RunDir:
    """The run's directory, held by rank 0, made if it is new; nothing in one that exists changes.

    All ranks call this together; OutputError on all alike.
    """

    def make() -> tuple[Path, RunLock]:
        path = make_run_dir(loaded)
        return path, RunLock(path)

    path, lock = found.path, found.lock
    if path is None:
        made = together(transport, lambda: make() if transport.rank == 0 else None)
        text = "" if made is None else str(made[0])
        path = Path(gather_texts(transport.world, transport.backoff, text)[0])
        lock = None if made is None else made[1]
    return RunDir(path, found.checkpoint, found.notes, lock)


def _locate(loaded: LoadedConfig, resume: str | None) -> tuple[Path | None, Path | None]:
    """The run directory, None for a new one, and the checkpoint that is named, if one is."""
    if resume is None:
        return None, None
    if resume == AUTO:
        return _run_of(loaded), None
    named = Path(resume)
    if (named / METRICS_FILE).is_file() or (named / CHECKPOINTS).is_dir():
        if not steps_in(named):
            raise MissingInputError(f"--resume {named}: has no checkpoint; name another run")
        return named, None
    if not named.is_dir():
        raise MissingInputError(
            f"--resume {named}: no such folder; name a run, one of its {CHECKPOINTS}/step-<n>, or "
            "auto"
        )
    wanted = loaded.config.run_dir
    run = named.resolve().parent.parent
    is_own = named.resolve().parent.name == CHECKPOINTS and (run / METRICS_FILE).is_file()
    if is_own and (wanted == "auto" or Path(wanted).resolve() == run):
        return (run if wanted == "auto" else Path(wanted)), named
    return None, named


def _run_of(loaded: LoadedConfig) -> Path | None:
    """The directory of the run that `auto` means: the one of the configuration, or else the last
    of its name; None if there is none yet."""
    wanted = loaded.config.run_dir
    if wanted != "auto":
        return Path(wanted) if (Path(wanted) / METRICS_FILE).is_file() else None
    last = None
    for number in itertools.count(1):
        path = Path("runs") / (loaded.name if number == 1 else f"{loaded.name}-{number}")
        if not (path / METRICS_FILE).is_file():
            return last
        last = path
    raise AssertionError("numbers do not end")


def _refuse_older(run_dir: Path, named: Path) -> None:
    """A run that went on from the middle would have two pasts."""
    step = step_of(named)
    if named.resolve().parent != (run_dir / CHECKPOINTS).resolve() or step is None:
        return
    newest = steps_in(run_dir)[0] if steps_in(run_dir) else step
    if newest > step:
        raise ConfigError(
            f"--resume {named}: the run has a later checkpoint, step-{newest}; give this one "
            f"another --run-dir, or run `axsparse checkpoint prune {run_dir} --after {step}`"
        )


def rewind_metrics(path: Path, progress: Progress | None) -> None:
    """Keep the records of what a checkpoint knows of; none without one, nor a torn last line.

    OSError if that cannot be.
    """
    if not path.exists():
        return
    keeps = _nothing if progress is None else _known_to(progress)
    partial = path.with_name(path.name + ".tmp")
    with path.open(encoding="utf-8", errors="replace") as old, partial.open("w") as new:
        for line in old:
            if keeps(line):
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    partial.replace(path)


def _nothing(line: str) -> bool:
    del line
    return False


def _known_to(progress: Progress) -> Callable[[str], bool]:
    def keeps(line: str) -> bool:
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            return False
        if not line.endswith("\n"):
            return False
        is_past = step < progress.step
        if "eval_loss" in record:
            return is_past or (step == progress.step and progress.evaluated)
        if "spike_loss" in record:  # those to come have jumped over more than the run has by now
            return step <= progress.step and int(record["jumped"]) <= progress.jumped
        if "masks" in record:
            return is_past or (step == progress.step and progress.masked)
        return step <= progress.step

    return keeps


METRICS_FILE = "metrics.jsonl"


CONFIG_FILE = "config.yaml"


def make_run_dir(loaded: LoadedConfig) -> Path:
    """Create the run directory; OutputError if it cannot be written or holds another run."""
    wanted = loaded.config.run_dir
    where = loaded.where("run_dir")
    if wanted != "auto":
        return _claim(Path(wanted), where)
    for number in itertools.count(1):
        path = Path("runs") / (loaded.name if number == 1 else f"{loaded.name}-{number}")
        try:
            return _claim(path, where)
        except _TakenError:
            continue
    raise AssertionError("numbers do not end")


class _TakenError(OutputError):
    """Another run has this directory."""


def _claim(path: Path, where: str) -> Path:
    """Make the directory and, in one indivisible step, the file that says whose it is."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / METRICS_FILE).open("x").close()
    except FileExistsError as reason:
        if not path.is_dir():
            raise OutputError(
                f"{where}: {path} is not a directory; choose another --run-dir"
            ) from reason
        raise _TakenError(
            f"{where}: {path} holds another run's {METRICS_FILE}, which would be mixed up; "
            "choose another --run-dir, or go on with that run by --resume auto"
        ) from reason
    except OSError as reason:
        raise OutputError(
            f"{where}: {path} cannot be written ({reason.strerror}); choose another --run-dir"
        ) from reason
    return path


def save_config(config: Config, run_dir: Path) -> None:
    """Write the resolved configuration, headed by versions and git hash."""
    head = [f"{name} {version}" for name, version in versions().items()]
    head.append(f"git {git_hash() or 'unknown'}")
    text = "".join(f"# {line}\n" for line in head) + to_yaml(config)
    try:
        (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    except OSError as reason:
        raise OutputError(
            f"{run_dir / CONFIG_FILE}: cannot be written ({reason.strerror}); "
            "choose another --run-dir"
        ) from reason
