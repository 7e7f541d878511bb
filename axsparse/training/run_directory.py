"""The directory of a run, a new or an existing one, and the checkpoint that it resumes from."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from axsparse.config.load import to_yaml
from axsparse.config.schema import Config, token_sources
from axsparse.config.section import flat
from axsparse.observe.metrics import WANDB_ID
from axsparse.observe.trace_file import TRACE_FILE, TRACES
from axsparse.pruning.mask_file import MASK_FILE, MASK_MARK
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    InUseError,
    MissingInputError,
    OutputError,
    reading,
    writing,
)
from axsparse.runtime.exchange import together, value_of_first
from axsparse.runtime.files.atomic import UNFINISHED, new_path
from axsparse.runtime.files.paths import expanded, is_own
from axsparse.runtime.files.run_folder import (
    ANOTHER_RUN_DIR,
    CONFIG_FILE,
    METRICS_FILE,
    OTHER_RUN_DIR,
    RESUME_AUTO,
    RunLock,
    RunMark,
    automatic_run_dirs,
    delete_own,
    has_mark,
    identifier_in,
    is_marked,
    last_run,
)
from axsparse.runtime.provenance import checkout_commit, versions
from axsparse.training.checkpoint import checkpoint_folder
from axsparse.training.checkpoint.checkpoint_folder import (
    CHECKPOINTS,
    away,
    path_of,
    run_of,
    step_of,
)
from axsparse.training.checkpoint.verification import (
    Checkpoint,
    newest_complete,
    remains,
    steps_in,
    verify_together,
    without_saved,
)
from axsparse.training.progress import Progress

AUTO = "auto"
"""The value of `resume` that means the newest complete checkpoint of the run, if there is one."""
HEALED = "healing"
"""The folder in the run directory with healed layers, until the first checkpoint has them."""
HEALED_FILE = re.compile(rf".+\.safetensors({re.escape(UNFINISHED)}.*)?")
MOST_CONFIG_BYTES = 1_000_000
NEVER = (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG)
"""The errors of making a directory that no later try ends."""


@dataclass(frozen=True)
class RunDir:
    """The directory that a run writes to, and the checkpoint that it is resumed from, if any."""

    found: Path | None = None
    """The directory of the run that is gone on with; None if the run gets a new one."""
    checkpoint: Checkpoint | None = None
    """The verified checkpoint, perhaps in another run's directory; None starts anew."""
    steps: tuple[int, ...] = ()
    """The steps of the checkpoints in `found`, newest first."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the existing checkpoints and the chosen one."""
    lock: RunLock | None = None
    """Keeps other jobs out of the directory; None on ranks other than 0, and without one."""
    made: Path | None = None
    """The new directory, once `open_run_dir` has made it."""
    absolute: Path | None = None
    """The absolute path of the directory, once `open_run_dir` has it."""
    overwrites: bool = False
    """Whether `begin` removes what another run has left in the new directory."""

    @property
    def path(self) -> Path:
        """The directory as messages name it, once it is open."""
        path = self.found or self.made
        assert path is not None, "`open_run_dir` comes first"
        return path

    @property
    def folder(self) -> Path:
        """The directory to read and write, also once the program has changed its working one."""
        assert self.absolute is not None, "`open_run_dir` comes first"
        return self.absolute

    @property
    def progress(self) -> Progress | None:
        """The state of training; None at its beginning.

        In another run directory than the checkpoint's, there is no best checkpoint yet, and none
        that somebody has removed.
        """
        if self.checkpoint is None:
            return None
        progress = self.checkpoint.manifest.progress.model_copy(deep=True)
        if progress.best is not None and (not self.found or progress.best.step not in self.steps):
            progress.best = None
        return progress

    def begin(self, config: Config) -> None:
        """Write the configuration, and remove the records of later steps than the run resumes at,
        or all records and checkpoints of a run that this one overwrites.

        Only rank 0 calls this. OutputError if the directory cannot be written.
        """
        folder = self.folder
        facts: dict[str, object] = {"at": str(folder.resolve()), "overwrites": self.overwrites}
        mark = RunMark.of(folder)
        if self.found is not None:
            began, *later = _own_starts(folder, "resume") or mark.starts
            facts |= {"began": began, "starts": [*later, uuid.uuid4().hex]}
        else:
            began_from = self.checkpoint and str(self.checkpoint.path.resolve())
            facts |= {"saved": False, "from": began_from, "name": config.name, "starts": []}
            facts["from_run"] = self.checkpoint and self.checkpoint.manifest.run
            if self.overwrites:
                facts["began"] = uuid.uuid4().hex
        mark.note(**facts)
        save_config(config.model_copy(update={"run_dir": str(self.path)}), folder)
        metrics, checkpoints = folder / METRICS_FILE, folder / CHECKPOINTS
        with writing(f"{checkpoints}:", OTHER_RUN_DIR):
            if self.overwrites:
                _clear(folder)
            checkpoints.mkdir(exist_ok=True)
        with writing(f"{metrics}:", OTHER_RUN_DIR):
            rewind_metrics(metrics, self.progress)
        if self.overwrites:
            mark.note(overwrites=False)


def find_run(config: Config, transport: Transport, resume: str | None, locks: ExitStack) -> RunDir:
    """Find the run that `resume` means, lock its directory on rank 0, and choose its checkpoint.

    `resume` is None for a new run, `AUTO`, or the path of a checkpoint or of a run. Of a run the
    newest complete checkpoint is chosen. All ranks call this together and verify the checkpoint
    together; an error is raised on all of them. `locks` releases the lock where the run cannot
    begin.
    """
    lock: RunLock | None = None

    def find() -> list[Any] | None:
        """On rank 0 the directory, the named checkpoint, else those there are, and remarks."""
        nonlocal lock
        if transport.rank != 0:
            return None
        where, way = f"resume: {resume}", "name another run"
        if resume == AUTO:
            where, way = f"{config.where('run_dir')}: {config.run_dir}", OTHER_RUN_DIR
        with reading(where, way):
            path, named = _locate(config, resume)
            if path is not None:
                lock = RunLock(path)
                locks.callback(lock.release)
                _own_starts(path, "resume")
                if named is not None:
                    _reject_older(path, named)
                elif resume == AUTO and RunMark.of(path).is_overwriting:  # it was killed meanwhile
                    with writing(f"{path / CHECKPOINTS}:", OTHER_RUN_DIR):
                        _clear(path)
            steps = steps_in(path) if path else []
            notes = remains(path) if path and not named else []
        return [path and str(path), named and str(named), steps, notes]

    path, named, steps, notes = value_of_first(transport, together(transport, find))
    if path is not None:
        _reject_unseen(transport, Path(path), config.where("run_dir"))
    checkpoint: Checkpoint | None = None
    if named is not None:
        checkpoint = verify_together(transport, Path(named))
    elif path is not None:
        checkpoint, skipped = newest_complete(transport, Path(path), steps)
        notes = [*notes, *skipped]
        if checkpoint is None:
            began_from = together(transport, lambda: _began_from(Path(path)))
            origin = value_of_first(transport, began_from)
            checkpoint = verify_together(transport, Path(origin)) if origin else None
    if checkpoint is not None:
        all_steps = config.train.steps
        left = "" if checkpoint.step < all_steps else f"; train.steps {all_steps} asks for no more"
        notes = [*notes, f"goes on from {checkpoint.path}, after step {checkpoint.step}{left}"]
        notes += _note_of_lost_best(config, checkpoint, steps)
        if path is not None and checkpoint.step in steps:
            notes += _note_of_lost_records(transport, Path(path, METRICS_FILE), checkpoint.step)
    elif path is not None:
        notes = [*notes, f"{path} has no checkpoint; starts from the beginning"]
    elif resume is not None:
        notes = [*notes, "there is no run to go on with; starts from the beginning"]
    there = None if path is None else Path(path)
    return RunDir(there, checkpoint, tuple(steps), tuple(notes), lock)


def _note_of_lost_best(config: Config, checkpoint: Checkpoint, steps: Sequence[int]) -> list[str]:
    """A line for the user if the best checkpoint is not among the steps that its run has."""
    best = checkpoint.manifest.progress.best if config.checkpoint.keep_best else None
    if best is None or checkpoint.step not in steps or best.step in steps:
        return []
    return [
        f"note: the checkpoint of step {best.step}, with the lowest validation loss "
        f"{best.loss:.4f}, is gone; the best one is sought anew from here on"
    ]


def _note_of_lost_records(transport: Transport, records: Path, step: int) -> list[str]:
    last = value_of_first(transport, _last_recorded(records) if transport.rank == 0 else 0)
    lacks = f"lacks the records after step {last} until step {step}"
    return [f"note: {records} {lacks}"] if last < step else []


def open_run_dir(
    config: Config, transport: Transport, run: RunDir, locks: ExitStack, *, overwrite: bool
) -> RunDir:
    """The directory of the run that was found, or a new one, which rank 0 makes and locks; `locks`
    is as in `find_run`.

    Nothing in a directory that exists is changed. All ranks call this together; OutputError is
    raised on all of them.
    """
    if run.found is not None:
        return replace(run, absolute=run.found.absolute())

    def make() -> tuple[Path, RunLock] | None:
        return make_run_dir(config, overwrite=overwrite) if transport.rank == 0 else None

    made = together(transport, make)
    path = Path(value_of_first(transport, made and str(made[0])))
    lock = None if made is None else made[1]
    if lock is not None:
        locks.callback(lock.release)
    _reject_unseen(transport, path, config.where("run_dir"))
    return replace(run, made=path, absolute=path.absolute(), lock=lock, overwrites=overwrite)


def _reject_unseen(transport: Transport, path: Path, where: str) -> None:
    """OutputError if a rank does not see the directory that rank 0 sees."""
    there = [path.is_dir(), identifier_in(path)]
    of_first, found = value_of_first(transport, [str(path.absolute()), there])

    def check() -> None:
        if there != found:
            raise OutputError(
                f"{where}: {path.absolute()} is not the directory {of_first} of rank 0; name one "
                "by its absolute path, on a disk that all hosts share"
            )

    together(transport, check)


# -- a new directory ------------------------------------------------------------------------


def make_run_dir(config: Config, *, overwrite: bool = False) -> tuple[Path, RunLock]:
    """Make the directory of a new run, and lock it.

    With `overwrite` it may be another run's, whose files `RunDir.begin` removes; ConfigError if the
    configuration names one of them.

    A directory is free if it has none of the files that a run writes, or if its run ended before
    the first step. Under `run_dir: auto` that holds for the last directory of the name only, since
    a later `--resume auto` means the last one.

    OutputError if the directory holds or is used by another run, or cannot be written.
    """
    setting, where = config.run_dir, config.where("run_dir")
    if overwrite:
        _reject_removed(config)
    if setting != "auto":
        return Path(setting), _claim(Path(setting), where, overwrite=overwrite)
    for path, following in itertools.pairwise(automatic_run_dirs(config.name)):
        with writing(f"{where}: {following}", OTHER_RUN_DIR):
            is_last = not is_marked(following)
        if is_last:
            with suppress(InUseError):
                return path, _claim(path, where)
    raise AssertionError("the names of run directories do not end")


def _claim(path: Path, where: str, *, overwrite: bool = False) -> RunLock:
    """Make a directory and its metrics.jsonl, and lock it; one job only can have it.

    Of two jobs that find a directory free at the same time, only one gets its lock. If the other
    gets it later, once the first has ended, it looks again at what the first has recorded.
    """
    with writing(f"{where}: {path}", OTHER_RUN_DIR):
        for folder in (path.resolve(), *path.resolve().parents):
            if folder.name == CHECKPOINTS and has_mark(folder.parent):
                raise ConfigError(
                    f"{where}: {path} is of the checkpoints of another run, which it removes in "
                    f"time; choose {ANOTHER_RUN_DIR}"
                )
        try:
            _reject_broken_link(path, where)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            if reason.errno not in NEVER:
                raise
            said = reason.strerror if reason.errno != errno.EEXIST else "there is a file"
            raise ConfigError(
                f"{where}: {path} cannot be a directory ({said}); choose {ANOTHER_RUN_DIR}"
            ) from reason
        try:
            is_marked(path)
        except ConfigError as reason:
            raise OutputError(f"{where}: {reason}") from reason
        if overwrite or not _contains_run(path):  # otherwise not even a lock file is left there
            _reject_broken_link(path / CHECKPOINTS, where)
            with ExitStack() as locks:
                lock = RunLock(path)
                locks.callback(lock.release)
                RunMark.of(path)
                if overwrite:
                    _own_starts(path, where, newest=-1)
                if _take(path, lock) or overwrite:
                    locks.pop_all()
                    return lock
        elif is_marked(path):  # One in use can be neither gone on with nor begun anew.
            RunLock(path).release()
    raise InUseError(
        f"{where}: {path} holds another run's records or checkpoints, which would be mixed up; "
        f"choose {ANOTHER_RUN_DIR}, or go on with that run by {RESUME_AUTO}, "
        "or begin it anew (in Python overwrite=True)"
    )


def _reject_removed(config: Config) -> None:
    """ConfigError if a file or folder that the run reads is one that `_clear` would remove."""
    run, model = Path(config.run_dir).resolve(), config.model
    given: list[tuple[str, str | None]]
    given = [("data.path", path) for path, _ in token_sources(config.data)]
    given += [("data.validation", config.data.validation), ("train.teacher", config.train.teacher)]
    given += [("model.weights", model.weights), ("model.from", model.from_)]
    for key, value in [*given, ("pruning.mask", config.pruning.mask)]:
        if value is None:
            continue
        path = Path(value)
        if key == "pruning.mask" and path.is_dir():
            path /= MASK_FILE
        path = path.parent.resolve() / path.name
        if path == run / MASK_FILE or any(
            step_of(folder) is not None and folder.parent == (run / CHECKPOINTS).resolve()
            for folder in (path, *path.parents)
        ):
            raise ConfigError(
                f"{config.where(key)}: {value} is of the run in {config.run_dir}, which overwrite "
                "removes; copy it elsewhere, or choose another run_dir"
            )


def _own_starts(run_dir: Path, where: str, newest: int | None = None) -> list[str]:
    """The identifiers of a run's starts, by its mark or, where a backup has put back an older one,
    by the checkpoints since then.

    OutputError for checkpoints of another run, which would be removed, and for other files by the
    names of those to come after the `newest`, by default the run's.
    """
    if not has_mark(run_dir):
        return []
    mark, folder = RunMark.of(run_dir), run_dir / CHECKPOINTS
    starts = [] if mark.is_overwriting else mark.starts  # what is there is of the run before
    steps = steps_in(run_dir)
    newest = max(steps, default=-1) if newest is None else newest
    for path in checkpoint_folder.foreign(folder, newest):
        raise OutputError(
            f"{where}: {path} is no checkpoint of a run, and in the place of one; put it "
            f"elsewhere, or {OTHER_RUN_DIR}"
        )
    for step in steps:
        path = path_of(folder, step)
        its = _starts_of(path)
        if its[: len(starts)] == starts:
            starts = its
        elif its and its[-1] not in starts:
            raise OutputError(
                f"{where}: {path} is another run's checkpoint, which would be removed; put it "
                f"elsewhere, or choose {ANOTHER_RUN_DIR}, in which --resume {path} continues it"
            )
    return starts


def _starts_of(checkpoint: Path) -> list[str]:
    """The starts until the one that a checkpoint is of; none if its manifest cannot be read."""
    with suppress(AxsparseError):
        return checkpoint_folder.read_manifest(checkpoint).run.split()
    return []


def _reject_broken_link(path: Path, where: str) -> None:
    """OutputError where a path leads by a link to a folder that is away."""
    for link in (path, *path.parents):
        if link.is_symlink() and not link.is_dir():
            raise OutputError(
                f"{where}: {link} is a link to {link.readlink()}, which is no folder; mount or "
                f"make it, or choose {ANOTHER_RUN_DIR}"
            )


def _clear(path: Path) -> None:
    """Remove the checkpoints, traces, healed layers and masks of a run, and the name of its curves
    at W&B; a mask file that no run has written stays, and ends the run that is to write one."""
    folder, began = path / CHECKPOINTS, RunMark.of(path).starts[0]
    for checkpoint in (*(path_of(folder, step) for step in steps_in(path)), *away(folder)):
        if _starts_of(checkpoint)[:1] != [began]:  # of an older mark, put back, it may be
            checkpoint_folder.remove(checkpoint)
    if (path / TRACES).is_dir():
        delete_own(path / TRACES, TRACE_FILE)
    delete_healed(path)
    if is_own(path / MASK_FILE, MASK_MARK):
        (path / MASK_FILE).unlink()
    (path / WANDB_ID).unlink(missing_ok=True)


def delete_healed(run_dir: Path) -> None:
    """Delete the layers that a run has healed, once a checkpoint has them."""
    if (run_dir / HEALED).is_dir():
        delete_own(run_dir / HEALED, HEALED_FILE)


def _take(path: Path, lock: RunLock) -> bool:
    """Make metrics.jsonl in a locked directory; False if the directory is another run's."""
    try:
        (path / METRICS_FILE).open("x").close()
    except FileExistsError:
        # Without a real lock, the run of an empty file may be about to record its first step.
        return lock.is_exclusive and not _contains_run(path)
    return True


def _contains_run(path: Path) -> bool:
    metrics = path / METRICS_FILE
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(steps_in(path))


def save_config(config: Config, run_dir: Path) -> None:
    """Write the resolved configuration, headed by the versions and the commit.

    OutputError if it cannot be written.
    """
    head = [f"{name} {version}" for name, version in versions().items()]
    head.append(f"git {checkout_commit() or 'unknown'}")
    text = "".join(f"# {line}\n" for line in head) + to_yaml(config)
    path = run_dir / CONFIG_FILE
    # Written anew: a copy by links keeps the older one.
    with writing(f"{path}:", OTHER_RUN_DIR), new_path(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def config_text(run_dir: Path) -> str:
    """The text of a run's config.yaml; empty if it cannot be read."""
    with suppress(OSError), (run_dir / CONFIG_FILE).open("rb") as file:
        return file.read(MOST_CONFIG_BYTES).decode("utf-8", errors="replace")
    return ""


def settings_in(text: str) -> dict[str, str]:
    """The values of a config.yaml by dotted key, as they stand there.

    Another version of axsparse may have written it: so keys are not compared with the schema's.
    """

    def shown(value: object) -> str:
        return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)

    try:
        # Every scalar stays the text that it is.
        parsed = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - it makes texts only
        settings = flat(parsed) if isinstance(parsed, Mapping) else {}
        return {str(key): shown(value) for key, value in settings.items()}
    except (yaml.YAMLError, RecursionError):
        return {}


# -- a directory that exists ----------------------------------------------------------------


def _locate(config: Config, resume: str | None) -> tuple[Path | None, Path | None]:
    """The run directory, None if a new one is wanted, and the checkpoint that `resume` names.

    The checkpoint is None if `resume` names a run, or none at all. A checkpoint, or the newest one
    of a run, that is not in the directory of the configuration begins a separate run.
    """
    if resume is None:
        return None, None
    if not isinstance(resume, str | os.PathLike) or not resume:
        raise ConfigError(
            f"resume: {resume!r} should be 'auto', the folder of a run or of a checkpoint, or None"
        )
    if resume == AUTO:
        last = last_run(config.run_dir, config.name)
        if last is not None:
            _finish_replacing(last)
        return last, None
    named = run_of(Path(expanded(resume)))
    if is_marked(named):
        _finish_replacing(named)
        steps = steps_in(named)
        newest = str(path_of(named / CHECKPOINTS, steps[0])) if steps else _began_from(named)
        if not newest:
            raise MissingInputError(f"resume: {named} has no checkpoint; name another run")
        if "run_dir" in config.origins and Path(config.run_dir).resolve() != named.resolve():
            return None, Path(newest)
        return named, None
    if not named.is_dir():
        raise MissingInputError(
            f"resume: {named} is no folder; name a run, one of its {CHECKPOINTS}/step-<n>, or auto"
        )
    setting, there = config.run_dir, named.resolve().parent
    folders = (there, named.absolute().parent)  # a run's folder of checkpoints may be a link
    run = next(
        (run_of(one) for one in folders if one.resolve() == there and run_of(one) != one), None
    )
    if run is not None and (setting == "auto" or Path(setting).resolve() == run.resolve()):
        return (run if setting == "auto" else Path(setting)), named
    return None, named


def _finish_replacing(run_dir: Path) -> None:
    """Give a checkpoint its name that a killed run left without, unless a job uses the run."""
    checkpoints = run_dir / CHECKPOINTS
    if checkpoint_folder.replacing(checkpoints):
        where = f"{checkpoints}:"
        with suppress(OutputError), writing(where, OTHER_RUN_DIR), ExitStack() as locks:
            lock = RunLock(run_dir)
            locks.callback(lock.release)
            if lock.is_exclusive:
                checkpoint_folder.finish_replacing(checkpoints)


def _began_from(run_dir: Path) -> str:
    """The checkpoint of another run that a run without one began from; empty if it has none.

    MissingInputError if that is gone or another's, or if the run has saved checkpoints and has
    none any more.
    """
    mark = RunMark.of(run_dir)
    if mark.has_saved:
        raise MissingInputError(f"{without_saved(run_dir)}, or start anew in {ANOTHER_RUN_DIR}")
    origin, why = mark.began_from or "", ""
    if origin and not Path(origin).is_dir():
        why = "is gone"
    elif origin and mark.began_from_run:
        starts, its = mark.began_from_run.split(), _starts_of(Path(origin))
        if its and its[: len(starts)] != starts:
            why = "is another run's now"
    if why:
        raise MissingInputError(
            f"{run_dir} has saved no checkpoint yet and began from {origin}, which {why}; put it "
            f"back, or start anew in {ANOTHER_RUN_DIR}"
        )
    return origin


def _reject_older(run_dir: Path, named: Path) -> None:
    """ConfigError if the run has later checkpoints, whose steps would be done again."""
    newest = max(steps_in(run_dir), default=0)
    try:
        step = checkpoint_folder.read_manifest(named).progress.step  # it may have any name
    except AxsparseError:  # of which the verification says more
        return
    if named.resolve().parent == (run_dir / CHECKPOINTS).resolve() and newest > step:
        raise ConfigError(
            f"resume: {named}: the run has a later checkpoint, step-{newest}; give this one "
            f"{ANOTHER_RUN_DIR}, or remove the later ones"
        )


def rewind_metrics(path: Path, progress: Progress | None) -> None:
    """Remove the records that are later than a checkpoint's progress, all of them without one.

    Lines that are damaged or cut short go too, a program's own objects without a step stay. OSError
    if the file cannot be written.
    """
    if not path.exists():
        return
    path = path.resolve()  # a link stays
    with (
        new_path(path) as unfinished,
        path.open(encoding="utf-8", errors="replace") as old,
        unfinished.open("w", encoding="utf-8") as new,
    ):
        for line in old:
            if progress is not None and _is_known(line, progress):
                new.write(line)


def _last_recorded(path: Path) -> int:
    """The last step in metrics.jsonl; 0 if there is none."""
    last = 0
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, AttributeError, TypeError, OverflowError):
                last = max(last, int(json.loads(line).get("step", 0)))
    return last


def _is_known(line: str, progress: Progress) -> bool:
    """Whether a line of metrics.jsonl records something that had happened at that progress."""
    try:
        record = json.loads(line)
        step = int(record.get("step", 0))
    except (ValueError, AttributeError, TypeError, OverflowError):
        return False
    if not line.endswith("\n"):
        return False
    done = {"eval_loss": progress.evaluated, "masks": progress.masked}
    is_done = all(of_now for kind, of_now in done.items() if kind in record)
    return step <= progress.step if is_done else step < progress.step
