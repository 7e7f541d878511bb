"""Reads job scripts: bash's and shellcheck's opinion, and directives that a scheduler would refuse.

The tables follow the schedulers' manuals, which each row names.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

NAME = r"[A-Za-z0-9][\w.@:/+-]*"
COUNT = r"[1-9][0-9]*"
CLOCK = r"[0-9]+:[0-5][0-9]:[0-5][0-9]"
SBATCH = "slurm.schedmd.com/sbatch.html#OPT_"
BSUB = "ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-bsub, option "
QSUB = "github.com/openpbs/openpbs, doc/man1/qsub.1B, option "
RESOURCES = "github.com/openpbs/openpbs, doc/man1/pbs_resources.7B, "
FLUX = "flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-batch.html, "
TABLES: dict[str, tuple[str, dict[str, tuple[str | None, str]]]] = {
    "slurm": (
        "#SBATCH",
        {
            "--job-name": (NAME, f"{SBATCH}job-name"),
            "--nodes": (COUNT, f"{SBATCH}nodes"),
            "--ntasks-per-node": (COUNT, f"{SBATCH}ntasks-per-node"),
            "--cpus-per-task": (COUNT, f"{SBATCH}cpus-per-task"),
            "--gpus-per-node": (COUNT, f"{SBATCH}gpus-per-node"),
            "--time": (CLOCK, f"{SBATCH}time: hours:minutes:seconds"),
            "--signal": (rf"B:USR1@{COUNT}", f"{SBATCH}signal: B: the batch shell alone, @seconds"),
            "--no-kill": (None, f"{SBATCH}no-kill: not when a node fails"),
            "--requeue": (None, f"{SBATCH}requeue"),
            "--open-mode": ("append", f"{SBATCH}open-mode: append or truncate"),
            "--output": (r"%x-%j\.log", f"{SBATCH}output: %x the job's name, %j its number"),
            "--account": (NAME, f"{SBATCH}account"),
            "--partition": (NAME, f"{SBATCH}partition"),
            "--constraint": (r".+", f"{SBATCH}constraint"),
            "--exclusive": (None, f"{SBATCH}exclusive"),
        },
    ),
    "lsf": (
        "#BSUB",
        {
            "-J": (NAME, f"{BSUB}-J"),
            "-n": (COUNT, f"{BSUB}-n: slots over all hosts"),
            "-R": (rf"span\[ptile={COUNT}\]", f"{BSUB}-R, span string: slots of each host"),
            "-gpu": (rf"num={COUNT}", f"{BSUB}-gpu: num, by default for each host"),
            "-W": (COUNT, f"{BSUB}-W: [hour:]minute"),
            "-r": (None, f"{BSUB}-r: again where the execution host fails"),
            "-o": (rf"{NAME}-%J\.log", f"{BSUB}-o: %J the job's number"),
            "-P": (NAME, f"{BSUB}-P"),
            "-q": (NAME, f"{BSUB}-q"),
            "-x": (None, f"{BSUB}-x"),
        },
    ),
    "pbs": (
        "#PBS",
        {
            "-N": (NAME, f"{QSUB}-N: a letter or digit first, no white space"),
            "-S": ("/bin/bash", f"{QSUB}-S"),
            "-l select": (
                rf"{COUNT}:ncpus={COUNT}:mpiprocs={COUNT}(:ngpus={COUNT})?",
                f"{QSUB}-l: select=N:chunk; {RESOURCES}ncpus, mpiprocs; ngpus is the site's",
            ),
            "-l place": ("scatter", f"{QSUB}-l: place, free|pack|scatter"),
            "-l walltime": (CLOCK, f"{RESOURCES}walltime"),
            "-l filesystems": (r"[\w:]+", f"{QSUB}-l: resource_name=value, here one of the site's"),
            "-W": (
                "tolerate_node_failures=(all|job_start|none)",
                f"{RESOURCES.replace('resources', 'job_attributes')}tolerate_node_failures",
            ),
            "-j": ("oe", f"{QSUB}-j: stderr into stdout"),
            "-k": ("doe", f"{QSUB}-k: d writes both streams to their last place at once"),
            "-A": (NAME, f"{QSUB}-A"),
            "-q": (NAME, f"{QSUB}-q"),
        },
    ),
    "flux": (
        "#flux:",
        {
            "--job-name": (NAME, f"{FLUX}job parameters"),
            "--nodes": (COUNT, f"{FLUX}job parameters"),
            "--exclusive": (None, f"{FLUX}job parameters: with --nodes"),
            "--time-limit": (rf"{COUNT}m", f"{FLUX}job parameters: minutes, or a number with unit"),
            "--output": (rf"{NAME}-\{{\{{id\}}\}}\.log", f"{FLUX}standard I/O: {{{{id}}}}"),
            "--bank": (NAME, f"{FLUX}other options"),
            "--queue": (NAME, f"{FLUX}job parameters"),
            "--requires": (r".+", f"{FLUX}constraints"),
        },
    ),
}
"""The prefix of a directive, and the options that we use: the pattern of a full value (None for
options without), and the place of the scheduler's manual that says so. Flux wants all directives to
begin alike and to come before other lines ("submission directives" of its page)."""


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


def _check(
    options: dict[str, str], known: dict[str, tuple[str | None, str]], name: str, value: str
) -> None:
    if name not in known:
        raise WrongDirectiveError(f"{name}: unknown option")
    if name in options:
        raise WrongDirectiveError(f"{name}: given twice")
    pattern, manual = known[name]
    if re.fullmatch("" if pattern is None else pattern, value) is None:
        raise WrongDirectiveError(f"{name}: bad value {value!r}; see {manual}")


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
