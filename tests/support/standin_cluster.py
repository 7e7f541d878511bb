"""Stand-in commands of SLURM, LSF, PBS and Flux that really run the job, on this machine at once.

`install` makes a folder for PATH. A submitted job runs before the command returns, and so do the
jobs that it submits; the exit codes of all stand in `starts.jsonl` next to the commands. Directives
are read as strictly as `directives` does. The nodes are node1, node2, …; one of which a file
NODE.down is in the folder answers nobody. Ranks under mpirun, srun and flux are processes with the
name of their node in STANDIN_NODE.
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

from support import directives

COMMANDS = (
    *("sbatch", "srun", "scontrol", "bsub", "blaunch"),
    *("qsub", "pbs_tmrsh", "flux", "mpirun"),
)
MOST_JOBS = 9
JOB = "41"
INSIDE = "STANDIN_INSIDE"


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
    """Exit codes of all jobs, in order; negative if a signal ended the shell of one."""
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- commands that take a script ---------------------------------------------------------


def sbatch(arguments: Sequence[str], state: Path) -> int:
    def environment(options: Mapping[str, str]) -> dict[str, str]:
        nodes = _nodes(int(options["--nodes"]))
        return {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": ",".join(nodes)}

    return _submit("slurm", arguments, state, f"Submitted batch job {JOB}", environment)


def bsub(arguments: Sequence[str], state: Path) -> int:
    def environment(options: Mapping[str, str]) -> dict[str, str]:
        slots = re.sub(r"\D", "", options["-R"])
        nodes = _nodes(int(options["-n"]) // int(slots))
        return {"LSB_JOBID": JOB, "LSB_MCPU_HOSTS": " ".join(f"{node} {slots}" for node in nodes)}

    return _submit("lsf", arguments, state, f"Job <{JOB}> is submitted to queue <n>.", environment)


def qsub(arguments: Sequence[str], state: Path) -> int:
    def environment(options: Mapping[str, str]) -> dict[str, str]:
        count, _, chunk = options["-l select"].partition(":")
        ranks = dict(one.split("=") for one in chunk.split(":"))["mpiprocs"]
        file = state / "nodefile"
        file.write_text("".join(f"{node}\n" * int(ranks) for node in _nodes(int(count))))
        return {"PBS_JOBID": f"{JOB}.server", "PBS_NODEFILE": str(file)}

    return _submit("pbs", arguments, state, f"{JOB}.server", environment)


def _batch(arguments: Sequence[str], state: Path) -> int:
    def environment(options: Mapping[str, str]) -> dict[str, str]:
        return {"STANDIN_NODES": options["--nodes"]}

    return _submit("flux", arguments, state, "f41", environment)


def _submit(
    scheduler: str,
    arguments: Sequence[str],
    state: Path,
    said: str,
    environment: Callable[[Mapping[str, str]], dict[str, str]],
) -> int:
    """Run a job and those that it submits, one after another."""
    if (state / "refuses").exists():
        print(f"{scheduler}: error: Invalid\n  account", file=sys.stderr)
        return 1
    text = Path(arguments[0]).read_bytes() if arguments else sys.stdin.buffer.read()
    options = directives.read(scheduler, text.decode(errors="surrogateescape"))
    print(said, flush=True)
    queue = state / "queue"
    if INSIDE in os.environ:
        queue.write_bytes(text)
        return 0
    for _ in range(MOST_JOBS):
        _run(text, state, {INSIDE: "1", **environment(options)})
        if not queue.exists():
            return 0
        text = queue.read_bytes()
        queue.unlink()
    return 1


def _run(script: bytes, state: Path, environment: Mapping[str, str]) -> None:
    """Run the script as a batch shell, in a separate group, and note how it ended."""
    spooled = state / "spooled.sh"
    spooled.write_bytes(script)
    launch = 'STANDIN_WARN_PID=${STANDIN_WARN_PID:-$$}; export STANDIN_WARN_PID; exec bash "$1"'
    with (state / "job.log").open("ab") as out:
        done = subprocess.run(
            ["bash", "-c", launch, "sh", str(spooled)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
            check=False,
        )
    with (state / "starts.jsonl").open("a") as file:
        file.write(f"{done.returncode}\n")


# --- nodes -------------------------------------------------------------------------------


def _nodes(count: int) -> list[str]:
    return [f"node{number + 1}" for number in range(count)]


def _answers(node: str, state: Path) -> int:
    return int((state / f"{node}.down").exists())


def scontrol(arguments: Sequence[str], state: Path) -> int:
    what, whom, nodes = arguments
    assert (what, whom) == ("show", "hostnames")
    print("\n".join(nodes.split(",")))
    return 0


def blaunch(arguments: Sequence[str], state: Path) -> int:
    node, command = arguments
    assert command == "true"
    return _answers(node, state)


pbs_tmrsh = blaunch


def flux(arguments: Sequence[str], state: Path) -> int:
    words = list(arguments)
    if words[0] == "--parent":
        assert INSIDE in os.environ
        words.pop(0)
    if words[0] == "batch":
        return _batch(words[1:], state)
    if words[0] == "hostlist":
        assert words[1:3] == ["--expand", "--delimiter=\\n"], words
        nodes = _nodes(int(os.environ["STANDIN_NODES"]))
        if words[3] == "avail":
            nodes = [node for node in nodes if not _answers(node, state)]
        print("\n".join(nodes))
        return 0
    if words == ["job", "last"]:
        print(JOB)
        return 0
    if words[:2] == ["job", "kill"]:
        assert words[2:] == ["--signal=USR1", JOB], words
        os.kill(int((state / "flux-run").read_text()), signal.SIGUSR1)
        return 0
    assert words[0] == "run", words
    (state / "flux-run").write_text(str(os.getpid()))
    options, command = _split(words[1:], re.compile(r"-[Nnc]\d+|--exclusive|--requires=host:\S+"))
    hosts = options[-1].partition(":")[2].split(",")
    count = int(options[1].removeprefix("-n"))
    assert options[0] == f"-N{len(hosts)}"
    return _launch(command, hosts, count)


# --- launchers ---------------------------------------------------------------------------


def mpirun(arguments: Sequence[str], state: Path) -> int:
    option, listed, flag, count, *command = arguments
    assert (option, flag) == ("--host", "-n")
    hosts = [word.partition(":")[0] for word in listed.split(",")]
    assert sum(int(word.partition(":")[2]) for word in listed.split(",")) >= int(count)
    return _launch(command, hosts, int(count))


def srun(arguments: Sequence[str], state: Path) -> int:
    """A probe of a node, or the launcher."""
    words = list(arguments)
    hosts = words[words.index("-w") + 1].split(",")
    options, command = words[: words.index("-w")], words[words.index("-w") + 2 :]
    if command == ["true"]:
        assert "--overlap" in options
        return _answers(hosts[0], state)
    count = next(int(word[2:]) for word in options if re.fullmatch(r"-n\d+", word))
    assert f"-N{len(hosts)}" in options
    return _launch(command, hosts, count)


def _split(arguments: Sequence[str], flag: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, and the command."""
    at = next(at for at, word in enumerate(arguments) if flag.fullmatch(word) is None)
    return list(arguments[:at]), list(arguments[at:])


def _launch(command: Sequence[str], hosts: Sequence[str], count: int) -> int:
    """Run the command once a rank and pass USR1 on; the highest exit code.

    Ranks fill one host after the other. A rank that a signal ends, ends the others.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has ended, and is not noted down yet
                    os.killpg(process.pid, number)

    # Before there are ranks a signal waits: none may be started without it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, forward)
    each = -(-count // len(hosts))
    processes.extend(
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "PMI_RANK": str(rank),
                "PMI_SIZE": str(count),
                "STANDIN_NODE": hosts[rank // each],
            },
            start_new_session=True,
        )
        for rank in range(count)
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    codes = []
    left = {process.pid: process for process in processes}
    while left:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        left.pop(pid).returncode = code
        codes.append(code if code >= 0 else 128 - code)
        if code < 0:
            for other in left:
                os.killpg(other, signal.SIGKILL)
    return max(codes)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:], Path(os.environ["STANDIN_DIR"])))
