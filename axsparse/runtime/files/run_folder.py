"""Which folder is a run's, by the settings of the run and by the mark in the folder, and its lock.

A run marks its directory before it writes anything else there. It starts only in a directory that
has none of a run's files, continues only in one that is marked, and removes nothing without the
mark. While it trains it holds the lock, which lets one job at a time write there. A copy of a
directory has the same mark; where links lead both to the same files, only the original gets them.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import glob
import itertools
import json
import os
import re
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from axsparse.runtime.errors import ConfigError, InUseError, OutputError, writing
from axsparse.runtime.files.atomic import new_path, write_new
from axsparse.runtime.process import write_line

MARK_FILE = "run.json"
"""The mark of a run directory: {"axsparse run": ID, "saved": whether a checkpoint was, "from": the
checkpoint of another run that it began from, or null, "name": its configuration's name, "at": its
path when it last began, "overwrites": whether files of a run before it are still to be removed,
"starts": an identifier of each time that it was gone on with, "began": one of the time that it was
begun anew, if it was}. A folder behind a link in it has the mark as well."""
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
TRACEBACK_FILE = "traceback-rank-{}.txt"
"""The traceback of an internal error of a rank."""
RUN_FILES = (
    *(MARK_FILE, METRICS_FILE, CONFIG_FILE, "checkpoints", "trace", "mask.safetensors"),
    *("heartbeat", "healing", "hang-report.txt", TRACEBACK_FILE.format("*")),
)
"""The files that a run writes into its directory, by pattern, apart from its lock."""
_KEY = "axsparse run"


def automatic_run_dirs(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3 and so on without an end, from the last run on that is
    there, since those before it may have been removed. Runs of a configuration whose own name ends
    in a number are left out."""
    marked = (
        path
        for path in Path("runs").glob(f"{glob.escape(name)}-*")
        if _read(path) and not _is_of_other(path, name)
    )
    matches = (re.fullmatch(r"-([1-9]\d*)", path.name.removeprefix(name)) for path in marked)
    for number in itertools.count(max((int(match[1]) for match in matches if match), default=1)):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not _is_of_other(path, name):
            yield path


def _is_of_other(path: Path, name: str) -> bool:
    """Whether an automatic directory has a run of a configuration of another name."""
    other = str((_read(path) or {}).get("name", name))
    return other != name and bool(re.fullmatch(rf"{re.escape(other)}(-[1-9]\d*)?", path.name))


def last_run(setting: str, name: str) -> Path | None:
    """The run that `run_dir` (the setting) means, or under `auto` the last run of the
    configuration's name; None where no run has begun. ConfigError as of `is_marked`."""
    if setting != "auto":
        return Path(setting) if is_marked(Path(setting)) else None
    last = None
    for path in automatic_run_dirs(name):
        if not is_marked(path):
            break
        last = path
    return last


def has_mark(path: Path) -> bool:
    return _read(path) is not None


def replaced(path: Path) -> OutputError:
    """The error of a run whose directory is gone, or another one."""
    return OutputError(
        f"{path} is not the directory of this run any more: it was moved, removed or replaced "
        "while the run trained, and nothing can be saved there; put it back, or start again with "
        f"{RESUME_AUTO} where it is now"
    )


def is_marked(path: Path) -> bool:
    """Whether a directory is a run's; ConfigError if it has files of a run, or another program's
    of the mark's name, but no mark."""
    if has_mark(path):
        return True
    found = foreign_files(path)
    if found:
        raise ConfigError(
            f"{path} has {' and '.join(found)}, but no whole {MARK_FILE}, the mark of a run: what "
            "is there may not be a run's, or not all of it; copy the whole directory, or choose "
            f"{ANOTHER_RUN_DIR} (--resume CHECKPOINT, in Python resume=, continues from one there)"
        )
    if os.path.lexists(path / MARK_FILE):
        raise ConfigError(
            f"{path} has a {MARK_FILE} that is no mark of a run, but another program's, or cut "
            f"short; put it elsewhere, or {OTHER_RUN_DIR}"
        )
    return False


def foreign_files(path: Path) -> list[str]:
    """The files in an unmarked directory that a run would write or replace; empty folders are
    none."""
    files = [*path.iterdir()] if path.is_dir() else []
    there = sorted(file.name for file in files if not file.is_dir() or any(file.iterdir()))
    found = [name for own in RUN_FILES if own != MARK_FILE for name in fnmatch.filter(there, own)]
    return found + ([LOCK_FILE] if _is_foreign_lock(path / LOCK_FILE) else [])


def own_files(folder: Path, named: re.Pattern[str]) -> list[Path]:
    """The files of a folder that have names of a run's files."""
    return [path for path in folder.iterdir() if named.fullmatch(path.name) and path.is_file()]


def delete_own(folder: Path, named: re.Pattern[str]) -> None:
    """Delete a run's files in a folder, and the folder unless it has other files, or files that
    cannot be deleted."""
    for path in own_files(folder, named):
        with suppress(PermissionError):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def identifier_in(path: Path) -> str | None:
    """The identifier of the run in a directory; None if no run has marked it."""
    content = _read(path)
    return None if content is None else str(content[_KEY])


class RunMark:
    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self._content = path, content

    @staticmethod
    def of(path: Path) -> RunMark:
        """The mark that is in a directory, or a new one."""
        content = _read(path)
        if content is None:
            content = {_KEY: uuid.uuid4().hex, "saved": False, "at": str(path.resolve())}
            write_new(path / MARK_FILE, json.dumps(content).encode())
        return RunMark(path, content)

    @property
    def identifier(self) -> str:
        """The run's alone, and its copies'."""
        return str(self._content[_KEY])

    @property
    def starts(self) -> list[str]:
        """The identifiers that its checkpoints have: the run's, or since it was begun anew another
        one, and one of each later start, by which a copy's from then on are another's."""
        began = self._content.get("began", self.identifier)
        return [str(start) for start in (began, *self._content.get("starts", []))]

    @property
    def has_saved(self) -> bool:
        return bool(self._content.get("saved"))

    @property
    def is_overwriting(self) -> bool:
        """Whether files of a run before it are still to be removed."""
        return bool(self._content.get("overwrites"))

    @property
    def began_from(self) -> str | None:
        """The absolute path of the checkpoint of another run that the run began from, if any."""
        return self._content.get("from")

    @property
    def began_from_run(self) -> str | None:
        """The identifiers of the starts of that checkpoint's run, with blanks between them."""
        return self._content.get("from_run")

    def check(self) -> None:
        """Read again what was noted; OutputError if the directory was moved, removed or replaced
        since the run began."""
        found = _read(self._path)
        if found is None or found.get(_KEY) != self._content.get(_KEY):
            raise replaced(self._path)
        self._content = found

    def note(self, **facts: object) -> None:
        """Note facts in the directory and in the folders that its links lead to. OutputError if
        that cannot be written."""
        self._content = {**(_read(self._path) or self._content), **facts}
        links = [link for link in _links_out(self._path) if link.is_dir()]
        for folder in (self._path, *links):
            if _read(folder) != self._content:
                path = folder / MARK_FILE
                with writing(f"{path}:", OTHER_RUN_DIR), new_path(path) as unfinished:
                    unfinished.write_text(json.dumps(self._content), encoding="utf-8")


def _links_out(run_dir: Path) -> list[Path]:
    """The links of a run directory by which it writes elsewhere."""
    here, names = run_dir.resolve(), ("checkpoints", "trace", METRICS_FILE)
    links = [run_dir / name for name in names if (run_dir / name).is_symlink()]
    return [link for link in links if not link.resolve().is_relative_to(here)]


def _reject_shared(run_dir: Path, option: str) -> None:
    """OutputError for a link to files of another run, which may be the original of this directory.
    A directory that was moved is no copy: nothing is at its former path."""
    for link in _links_out(run_dir):
        target = link.resolve()
        found = [(target.parent, _read(target.parent))]
        marks = (_read(target), _read(run_dir))
        found += [(Path(str(mark.get("at"))), mark) for mark in marks if mark is not None]
        for other, mark in found:
            is_there = mark is not None and (_read(other) or {}).get(_KEY) == mark[_KEY]
            if is_there and not other.samefile(run_dir):
                raise OutputError(
                    f"{link}: is a link to {target}, which may be the files of the run in {other}; "
                    f"put a copy of them in place of the link, or choose another {option}"
                )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((path / MARK_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    is_mark = isinstance(content, dict) and _KEY in content
    return content if is_mark and isinstance(content.get("starts", []), list) else None


LOCK_FILE = "run.lock"
RUN_DIR = "--run-dir (in Python run_dir=)"
ANOTHER_RUN_DIR = f"another {RUN_DIR}"
OTHER_RUN_DIR = f"choose {ANOTHER_RUN_DIR}"
RESUME_AUTO = '--resume auto (in Python resume="auto")'


class RunLock:
    """Holds a folder, such as a run directory, for this process; however the process ends, the
    system releases the lock."""

    def __init__(self, folder: Path, option: str = RUN_DIR, name: str = LOCK_FILE) -> None:
        """InUseError if another process holds the folder, OutputError if it cannot be written, and
        for a copy of a run whose links lead to the files of the original. On a file system without
        locks a warning is printed.

        `option` is the one by which the user names the folder, `name` is the locked file there.
        """
        path, advice = folder / name, f"choose another {option}"
        with writing(f"{path}:", advice):
            _reject_shared(folder, option)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        # The descriptor is closed with this object, and without the warning that Python gives for
        # a file that nobody has closed.
        self.release: Callable[[], object] = weakref.finalize(self, os.close, number)
        self.is_exclusive = True
        """Whether other processes are kept out; False on a file system without locks."""
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            if reason.errno in (errno.EACCES, errno.EAGAIN):  # another process holds it
                self.release()
                holder, way = _holder(path) or "another process", "wait for its end"
                if holder.endswith(f"process {os.getpid()} on {socket.gethostname()}"):
                    holder, way = "a Trainer of this program", "close() it"
                raise InUseError(f"{folder}: is in use by {holder}; {way}, or {advice}") from reason
            self.is_exclusive = False
            write_line(
                f"warning: {path}: cannot be locked ({reason.strerror}); see that no other job "
                "uses this directory"
            )
        if _is_foreign_lock(path) and not has_mark(folder):
            self.release()
            raise OutputError(f"{path}: is no lock of axsparse, and stays; {advice}")
        job = os.environ.get("SLURM_JOB_ID", os.environ.get("LSB_JOBID"))
        said = {"host": socket.gethostname(), "process": os.getpid(), "job": job}
        with writing(f"{path}:", advice):
            os.ftruncate(number, 0)
            os.pwrite(number, json.dumps(said).encode(), 0)


def _is_foreign_lock(path: Path) -> bool:
    """Whether a file that is not empty has the name of a lock, and no owner."""
    return path.is_file() and path.stat().st_size > 0 and _holder(path) is None


def _holder(path: Path) -> str | None:
    """The owner of a directory, according to the contents of its lock file, if they name one."""
    try:
        holder = json.loads(path.read_bytes())
        job = f"job {holder['job']}, " if holder["job"] is not None else ""
        return f"{job}process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None
