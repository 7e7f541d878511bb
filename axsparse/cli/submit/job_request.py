"""What a job asks a scheduler for, checked before anything is written.

A script is read twice: the scheduler reads its directives, a shell reads its commands. Texts
in a directive may hold only letters without a meaning for either; texts in a command are
quoted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime.errors import ConfigError

MOST = 10_000_000
"""The largest count accepted: more than any cluster has, and within 32 bits."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:/+-]*")
_DURATION = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_LIVE = frozenset("$`\"'\\%")
"""Letters that shells or schedulers replace in a directive, even between quotes."""


@dataclass(frozen=True)
class JobRequest:
    """A job, in terms that every scheduler has."""

    name: str
    nodes: int
    ranks: int
    """Ranks over all nodes; each node has the same number."""
    cpus_per_rank: int
    threads: int
    """Threads that a rank computes with (`train.threads`)."""
    gpus_per_node: int
    seconds: int
    """Time limit of each start, in seconds."""
    margin: int
    """Seconds before the limit at which the ranks are told to save."""
    account: str | None
    queue: str | None
    """The queue; SLURM calls it a partition."""
    directives: tuple[str, ...]
    """More options that the site requires, written as for its scheduler: "--constraint=gpu"."""
    chain: int
    """Number of jobs that continue one another; if 1, the scheduler restarts the same job."""
    launcher: str
    mpi: str | None
    """The value of srun's --mpi; None leaves it to the site."""
    mpirun: str
    """Path or name of mpirun."""
    folder: Path
    """The working folder of the job; absolute, like all paths here."""
    run_dir: Path
    """The run directory, where logs go as well."""
    setup: Path | None
    """A file that the job's shell sources first, for modules and variables."""
    python: Path
    prefix: Path
    """The environment that holds `python`."""
    copy_to: Path | None
    """A folder on each node to copy the environment into; None runs it from where it is."""
    train: tuple[str, ...]
    """The arguments of python: "-m", "axsparse.train", …"""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


def check(request: JobRequest) -> None:
    """ConfigError for numbers that do not fit together, and for texts that no script can hold."""
    if request.ranks % request.nodes:
        below = request.ranks - request.ranks % request.nodes
        choices = f"{below} or {below + request.nodes}" if below else f"{request.nodes}"
        raise ConfigError(
            f"--ranks: {request.ranks} does not spread evenly over {request.nodes} nodes; "
            f"choose {choices}"
        )
    if request.threads > request.cpus_per_rank:
        raise ConfigError(
            f"--cpus-per-rank: {request.cpus_per_rank} is below train.threads "
            f"{request.threads}; choose at least {request.threads}"
        )
    if request.margin >= request.seconds:
        raise ConfigError(
            f"--margin: {clock(request.margin)} before the end of a job of "
            f"{clock(request.seconds)} is before its start; choose a shorter one, or a longer "
            "--time"
        )
    if request.mpi is not None and request.launcher != "srun":
        raise ConfigError(
            f"--mpi: {request.mpi} is for srun, and the launcher is {request.launcher}; leave it "
            "out, or choose --launcher srun"
        )
    if request.copy_to is not None:
        _check_copy(request, request.copy_to)
    for word in request.train:
        one_line("--config, --set", word)
    for flag, path in (
        ("working folder", request.folder),
        ("--setup", request.setup),
        ("python", request.python),
        ("--copy-environment", request.copy_to),
    ):
        one_line(flag, str(path))
    if _LIVE & set(str(request.run_dir)):
        raise ConfigError(
            f"run_dir: {str(request.run_dir)!r} holds one of {' '.join(sorted(_LIVE))}, which "
            "schedulers replace in the name of the log; choose another --run-dir"
        )
    one_line("run_dir", str(request.run_dir))


def _check_copy(request: JobRequest, place: Path) -> None:
    if not place.is_absolute() or len(place.parts) < 2:
        raise ConfigError(
            f"--copy-environment: {str(place)!r} is no folder on each node; name one from the "
            "root on, such as /tmp"
        )
    alone = (request.prefix / "pyvenv.cfg").exists() or (request.prefix / "conda-meta").exists()
    if not alone or not request.python.is_relative_to(request.prefix):
        raise ConfigError(
            f"--copy-environment: {request.python} is not of a venv or conda environment that "
            "could be copied; install axsparse into one, or leave the option out"
        )


def count(flag: str, text: str, *, least: int = 1) -> int:
    """The whole number that an option holds; ConfigError if it holds none."""
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= MOST:
        return int(text)
    raise ConfigError(
        f"{flag}: {_short(text)} is no whole number from {least} to {MOST}; choose one"
    )


def duration(flag: str, text: str) -> int:
    """The seconds of "H:MM:SS" or "D-HH:MM:SS"; ConfigError for other texts.

    Shorter forms are refused, since schedulers disagree: 2:00 is two minutes for SLURM and
    two hours for LSF.
    """
    found = _DURATION.fullmatch(text)
    seconds = 0
    if found is not None:
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not 0 < seconds <= MOST * 10:
        raise ConfigError(
            f"{flag}: {_short(text)} is no time; write H:MM:SS or D-HH:MM:SS, such as 2:00:00"
        )
    return seconds


def name(flag: str, text: str) -> str:
    """The name of a job, an account or a queue; ConfigError for letters with a special meaning."""
    if _NAME.fullmatch(text) is None or len(text) > 200:
        raise ConfigError(
            f"{flag}: {_short(text)} is no name; use letters, digits and _ . @ : / + -, "
            "beginning with a letter or digit"
        )
    return text


def directive(text: str) -> str:
    """A directive, as written after #SBATCH or #BSUB; ConfigError for other texts."""
    one_line("--directive", text)
    if {"$", "`", "\\"} & set(text):
        raise ConfigError(
            f"--directive: {_short(text)} holds $, ` or \\, which no scheduler replaces there; "
            "write the value itself"
        )
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or re.match(r"--?[A-Za-z]", words[0]) is None:
        raise ConfigError(
            f"--directive: {_short(text)} is no option of a scheduler; write it as in a job "
            "script, such as --directive=--constraint=gpu"
        )
    return text


def one_line(flag: str, text: str) -> str:
    """A text on one line; ConfigError if it holds control characters."""
    # Editors and terminals end a line at more characters than a shell does.
    if any(ord(letter) < 32 or letter in "\x7f\x85\u2028\u2029" for letter in text):
        raise ConfigError(
            f"{flag}: {_short(text)} holds a line break or another control character; remove it"
        )
    return text


def clock(seconds: int) -> str:
    """Seconds as "H:MM:SS"."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _short(text: str) -> str:
    """The repr of a value, cut to 60 characters."""
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
