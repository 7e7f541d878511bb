"""Stand-in commands of SLURM and LSF that really run the job, on this machine and at once.

`install` makes a folder for PATH. `sbatch` and `bsub` return when the job and all that
follow from it (requeued, or next in a chain) have ended; which starts there were, and with
which code, stands in `starts.jsonl` beside the commands. Directives are read and checked as
strictly as `directives` does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.directives import read_lsf, read_slurm

COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "bsub", "jsrun", "bkill")
MOST_STARTS = 9
JOB = "41"


def install(folder: Path) -> Path:
    """A folder with the commands."""
    folder.mkdir(parents=True)
    for name in COMMANDS:
        path = folder / name
        tests = Path(__file__).resolve().parents[1]
        words = [sys.executable, "-m", "support.standin_cluster", name]
        path.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(tests))} "
            f"STANDIN_DIR={shlex.quote(str(folder))} "
            f'exec {shlex.join(words)} "$@"\n'
        )
        path.chmod(0o755)
    return folder


def starts(folder: Path) -> list[int]:
    """Exit codes of the starts of a job, in order; negative if a signal ended its shell."""
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- commands of the scheduler -----------------------------------------------------------


def sbatch(arguments: Sequence[str], state: Path) -> int:
    [path] = arguments
    script = Path(path).read_text(errors="surrogateescape")
    options = read_slurm(script)
    print(f"Submitted batch job {JOB}", flush=True)
    last = int(options.get("--array", "1-1%1").removeprefix("1-").removesuffix("%1"))
    index = restarts = 0
    for _ in range(MOST_STARTS):
        if not restarts:
            index += 1
        log = Path(options["--output"].replace("%A", JOB).replace("%a", str(index)))
        log = log.with_name(log.name.replace("%j", JOB))
        environment = {
            "SLURM_JOB_ID": JOB,
            "SLURM_NTASKS": options["--ntasks"],
            "SLURM_JOB_NUM_NODES": options["--nodes"],
            "SLURM_PROCID": "0",
            "SLURM_RESTART_COUNT": str(restarts),
            **({"SLURM_ARRAY_JOB_ID": JOB} if "--array" in options else {}),
        }
        _start(script, log, environment, state, whole_group=False)
        restarts = restarts + 1 if _taken(state / "requeue") else 0
        if not restarts and (_taken(state / "cancel") or index == last):
            return 0
    return 1


def scontrol(arguments: Sequence[str], state: Path) -> int:
    if list(arguments) != ["requeue", JOB] or (state / "refuse-requeue").exists():
        print("scontrol: error: Requested operation is presently disabled", file=sys.stderr)
        return 1
    (state / "requeue").touch()
    # A requeued job is ended, whatever it is doing; this command is a part of it.
    os.killpg(os.getpgid(0), signal.SIGKILL)
    return 0


def scancel(arguments: Sequence[str], state: Path) -> int:
    if list(arguments) != ["--state=PENDING", JOB]:
        return 1
    (state / "cancel").touch()
    return 0


def bsub(arguments: Sequence[str], state: Path) -> int:
    if arguments:
        return 1
    script = sys.stdin.read()
    options = read_lsf(script)
    print(f"Job <{JOB}> is submitted to default queue <normal>.", flush=True)
    array = re.fullmatch(r".*\[1-(\d+)\]%1", options["-J"])
    last, index, again = int(array[1]) if array else 0, 0, False
    for _ in range(MOST_STARTS):
        index += 1 if array and not again else 0
        log = Path(options["-o"].replace("%J", JOB).replace("%I", str(index)))
        environment = {"LSB_JOBID": JOB, "LSB_JOBINDEX": str(index)}
        # LSF signals every process of a job.
        code = _start(script, log, environment, state, whole_group=True)
        again = str(code) in options.get("-Q", "").split()
        cancelled = state / "cancel"
        stopped = cancelled.exists() and cancelled.read_text() == f"{JOB}[{index + 1}-{last}]"
        if not again and (stopped or index == last):
            return 0
    return 1


def bkill(arguments: Sequence[str], state: Path) -> int:
    [which] = arguments
    (state / "cancel").write_text(which)
    return 0


def _start(
    script: str, log: Path, environment: Mapping[str, str], state: Path, *, whole_group: bool
) -> int:
    """Run the script as a batch shell, in a group of its own, and note how it ended."""
    spooled = state / "spooled.sh"
    spooled.write_text(script, errors="surrogateescape")
    launch = 'STANDIN_WARN_PID=$1$$; export STANDIN_WARN_PID; shift; exec bash "$@"'
    with log.open("ab") as out:
        done = subprocess.run(
            ["bash", "-c", launch, "sh", "-" if whole_group else "", str(spooled)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
            check=False,
        )
    with (state / "starts.jsonl").open("a") as file:
        file.write(f"{done.returncode}\n")
    return done.returncode


def _taken(marker: Path) -> bool:
    there = marker.exists()
    marker.unlink(missing_ok=True)
    return there


# --- launchers ---------------------------------------------------------------------------


def srun(arguments: Sequence[str], state: Path) -> int:
    options, command = _split(arguments, flag=re.compile(r"--[a-z-]+=[A-Za-z0-9]+|-K1"))
    values = dict(option.partition("=")[::2] for option in options)
    count = int(values["--ntasks"])
    # What is started once a node is no rank; here, all nodes are one.
    ranks = count if values.get("--ntasks-per-node") != "1" else 1
    shared = {"SLURM_NTASKS": str(count), "SLURM_STEP_ID": "0"}
    each = [{**shared, "SLURM_PROCID": str(rank)} for rank in range(ranks)]
    return _launch(command, each, spares=lambda code: code == 0 or "-K1" not in options)


def jsrun(arguments: Sequence[str], state: Path) -> int:
    options, command = _split(arguments, flag=re.compile(r"-[acgr][0-9]+|-n|[0-9]+"))
    count = int(options[options.index("-n") + 1])
    ranks = count if "-r1" not in options else 1
    size = {"JSM_NAMESPACE_SIZE": str(count)}
    each = [{**size, "JSM_NAMESPACE_RANK": str(rank)} for rank in range(ranks)]
    return _launch(command, each, spares=lambda code: code >= 0)


def _split(arguments: Sequence[str], flag: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, and the command."""
    at = next(at for at, word in enumerate(arguments) if flag.fullmatch(word) is None)
    return list(arguments[:at]), list(arguments[at:])


def _launch(
    command: Sequence[str], ranks: Sequence[Mapping[str, str]], *, spares: Callable[[int], bool]
) -> int:
    """Run the command once a rank and pass USR1 on; the highest exit code.

    A rank's code (negative: the signal that ended it) ends the others unless it `spares` them.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        # A launcher signals all processes of a rank.
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has ended, and is not noted down yet
                    os.killpg(process.pid, number)

    # Before there are ranks a signal waits: none may be started without it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, forward)
    # In sessions of their own, since a group's signal would reach them twice.
    processes.extend(
        subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)
        for own in ranks
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    codes = []
    left = {process.pid: process for process in processes}
    while left:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        left.pop(pid).returncode = code
        codes.append(code if code >= 0 else 128 - code)
        if not spares(code):
            for other in left:
                os.killpg(other, signal.SIGKILL)
    return max(codes)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:], Path(os.environ["STANDIN_DIR"])))
