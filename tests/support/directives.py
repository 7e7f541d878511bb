"""Reads job scripts: bash's and shellcheck's opinion, and directives that a scheduler would refuse.

The tables follow the schedulers' manuals, which are named above each.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

NAME = r"[A-Za-z0-9][\w.@:/+-]*"
COUNT = r"[1-9][0-9]*"
CLOCK = r"[0-9]+:[0-5][0-9]:[0-5][0-9]"
TABLES: dict[str, tuple[str, dict[str, str | None]]] = {
    # slurm.schedmd.com/sbatch.html: options; %x is the job's name and %j its number.
    "slurm": (
        "#SBATCH",
        {
            "--job-name": NAME,
            "--nodes": COUNT,
            "--ntasks-per-node": COUNT,
            "--cpus-per-task": COUNT,
            "--gpus-per-node": COUNT,
            "--time": CLOCK,
            "--signal": rf"B:USR1@{COUNT}",
            "--no-kill": None,
            "--requeue": None,
            "--open-mode": "append",
            "--output": r"%x-%j\.log",
            "--account": NAME,
            "--partition": NAME,
            "--constraint": r".+",
            "--exclusive": None,
        },
    ),
    # ibm.com/docs/en/spectrum-lsf/10.1.0?topic=bsub-options: -W takes [hour:]minute, num= of -gpu
    # and ptile count for each host, %J is the job's number.
    "lsf": (
        "#BSUB",
        {
            "-J": NAME,
            "-n": COUNT,
            "-R": rf"span\[ptile={COUNT}\]",
            "-gpu": rf"num={COUNT}",
            "-W": COUNT,
            "-r": None,
            "-o": rf"{NAME}-%J\.log",
            "-P": NAME,
            "-q": NAME,
            "-x": None,
        },
    ),
    # github.com/openpbs/openpbs, doc/man1: qsub.1B, pbs_resources.7B, pbs_job_attributes.7B.
    "pbs": (
        "#PBS",
        {
            "-N": NAME,
            "-S": "/bin/bash",
            "-l select": rf"{COUNT}:ncpus={COUNT}:mpiprocs={COUNT}(:ngpus={COUNT})?",
            "-l place": "scatter",
            "-l walltime": CLOCK,
            "-l filesystems": r"[\w:]+",
            "-W": "tolerate_node_failures=(all|job_start|none)",
            "-j": "oe",
            "-k": "doe",
            "-A": NAME,
            "-q": NAME,
        },
    ),
    # flux-framework.readthedocs.io, flux-batch(1): --time-limit takes minutes or a duration with a
    # unit, --exclusive goes with --nodes, all directives begin alike and come before other lines.
    "flux": (
        "#flux:",
        {
            "--job-name": NAME,
            "--nodes": COUNT,
            "--exclusive": None,
            "--time-limit": rf"{COUNT}m",
            "--output": rf"{NAME}-\{{\{{id\}}\}}\.log",
            "--bank": NAME,
            "--queue": NAME,
            "--requires": r".+",
        },
    ),
}
"""The prefix of a directive, and the options that we use: the pattern of a full value, None for
options without."""


class WrongDirectiveError(ValueError):
    """A directive that a scheduler would refuse or misread."""


def read(scheduler: str, script: str) -> dict[str, str]:
    """Option -> value; "" for those without. An option of PBS's -l goes with its resource."""
    prefix, known = TABLES[scheduler]
    options: dict[str, str] = {}
    for line in _lines(script, prefix):
        words = _words(line)
        while words:
            name, equals, value = words.pop(0).partition("=")
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if name == "-l":
                resource, _, value = value.partition("=")
                name = f"-l {resource}"
            _check(options, known, name, value)
            options[name] = value
    return options


def _lines(script: str, prefix: str) -> list[str]:
    """The text after a prefix, up to the first command."""
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
    if not words or not words[0].startswith("-"):
        raise WrongDirectiveError(f"{line!r}: no option")
    return words


def _check(options: dict[str, str], known: dict[str, str | None], name: str, value: str) -> None:
    if name not in known:
        raise WrongDirectiveError(f"{name}: unknown option")
    if name in options:
        raise WrongDirectiveError(f"{name}: given twice")
    pattern = known[name]
    if re.fullmatch("" if pattern is None else pattern, value) is None:
        raise WrongDirectiveError(f"{name}: bad value {value!r}")


KNOWN_TO_SHELLCHECK = "SC1091,SC2015,SC2016,SC2317"
"""A file of the user's is not followed, quoted words may hold a $, `a && b || c` is meant so, and
functions are called by name."""


def assert_a_shell_reads(script: str) -> None:
    """`bash -n`, and shellcheck where it is installed."""
    commands = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--shell=bash", f"--exclude={KNOWN_TO_SHELLCHECK}", "-"])
    for command in commands:
        said = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{command[0]}: {said.stdout}{said.stderr}\n{script}"
