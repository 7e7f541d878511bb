"""Reads job scripts: what bash says of them, and directives that a scheduler would refuse."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

NAME = r"[A-Za-z0-9][\w.@:/+-]*"
COUNT = r"[1-9][0-9]*"
LSF = {
    "-J": rf"{NAME}(\[1-{COUNT}\]%[1-9])?",
    "-nnodes": COUNT,
    "-n": COUNT,
    "-R": r"span\[ptile=[1-9][0-9]*\]|rusage\[.+\]|select\[.+\]",
    "-gpu": r"num=[1-9][0-9]*",
    "-W": r"[0-9]+:[0-5][0-9]",
    "-wa": r"USR1|URG|INT|TERM",
    "-wt": COUNT,
    "-r": None,
    "-Q": r"[0-9]+( [0-9]+)*",
    "-o": r"/.+",
    "-P": NAME,
    "-q": NAME,
    "-alloc_flags": r"[\w ]+",
    "-x": None,
}
"""LSF's options that we know; the whole of a value, None for those without."""
SLURM = {
    "--job-name": NAME,
    "--nodes": COUNT,
    "--ntasks": COUNT,
    "--ntasks-per-node": COUNT,
    "--cpus-per-task": COUNT,
    "--gpus-per-node": COUNT,
    "--distribution": "block",
    "--time": r"[0-9]+:[0-5][0-9]:[0-5][0-9]",
    "--signal": rf"B:USR1@{COUNT}",
    "--requeue": None,
    "--no-kill": None,
    "--array": rf"1-{COUNT}%1",
    "--open-mode": "append",
    "--output": r"/.+",
    "--account": NAME,
    "--partition": NAME,
    "--constraint": r".+",
    "--exclusive": None,
    "--comment": r".+",
}


class WrongDirectiveError(ValueError):
    """A directive that a scheduler would refuse or misread."""


def read_slurm(script: str) -> dict[str, str]:
    """Option -> value; "" for those without."""
    options: dict[str, str] = {}
    for word in [word for line in _lines(script, "#SBATCH") for word in _words(line)]:
        name, _, value = word.partition("=")
        _keep(options, SLURM, name, value if "=" in word else None)
    return options


def read_lsf(script: str) -> dict[str, str]:
    """Option -> value; "" for those without."""
    options: dict[str, str] = {}
    for line in _lines(script, "#BSUB"):
        name, *values = _words(line)
        if len(values) > 1:
            raise WrongDirectiveError(f"{line!r}: several values; quote them")
        _keep(options, LSF, name, values[0] if values else None)
    if ("-wa" in options) != ("-wt" in options):
        raise WrongDirectiveError("-wa and -wt go together")
    return options


def _lines(script: str, prefix: str) -> list[str]:
    """What stands behind a prefix, up to the first command."""
    first, *rest = script.split("\n")
    if not first.startswith("#!/"):
        raise WrongDirectiveError(f"{first!r}: no interpreter")
    found = []
    for number, line in enumerate(rest):
        if line and not line.startswith("#"):
            late = [line for line in rest[number:] if line.startswith(prefix)]
            if late:
                raise WrongDirectiveError(f"{late[0]!r}: behind the first command")
            break
        if line.startswith(prefix):
            found.append(line.removeprefix(prefix).strip())
    return found


def _words(line: str) -> list[str]:
    if re.search(r"[$`\\]", line):
        raise WrongDirectiveError(f"{line!r}: schedulers replace no variables")
    try:
        words = shlex.split(line, comments=False)
    except ValueError as reason:
        raise WrongDirectiveError(f"{line!r}: {reason}") from None
    if not words:
        raise WrongDirectiveError("an empty directive")
    return words


def _keep(
    options: dict[str, str], known: dict[str, str | None], name: str, value: str | None
) -> None:
    if name not in known:
        raise WrongDirectiveError(f"{name}: unknown option")
    if name in options:
        raise WrongDirectiveError(f"{name}: given twice")
    pattern = known[name]
    fits = value is None if pattern is None else re.fullmatch(pattern, value or "") is not None
    if not fits:
        raise WrongDirectiveError(f"{name}: bad value {value!r}")
    options[name] = value or ""


KNOWN_TO_SHELLCHECK = "SC1091,SC2015,SC2016"
"""A file of the user's is not followed, quoted words may hold a $, `a && b || c` is meant so."""


def assert_a_shell_reads(script: str) -> None:
    """`bash -n`, and shellcheck where it is installed."""
    commands = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--shell=bash", f"--exclude={KNOWN_TO_SHELLCHECK}", "-"])
    for command in commands:
        said = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{command[0]}: {said.stdout}{said.stderr}\n{script}"
