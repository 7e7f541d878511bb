"""Starts commands on real MPI ranks, and ends them whatever they do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.warm_python import warm_python

from axsparse.runtime.shared_segments import SHARED

TESTS = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 300.0
"""Far beyond what any job takes, on a machine that has much else to do."""
KILLED = (9, 137, 255)
"""Exit codes of launchers for a rank that was killed: the first is MPICH's mpirun's, the second
other launchers'. The third is MPICH's own: under load its helper process sometimes ends before it
has reported ("control_cb … assert (!closed) failed")."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
    # Open MPI refuses to run as root, with more ranks than cores, or unbound, unless told to.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # Else ranks of MPICH and of Open MPI listen to other hosts.
    "UCX_TLS": "self,sm",
    "OMPI_MCA_btl": "self,sm",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Finished:
    """The end of a job, with the output of all ranks."""

    returncode: int
    """Negative if the job ran past its limit and was killed."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The lines meant for the user."""
        return [line for line in self.stderr.splitlines() if line.startswith("axsparse: error:")]

    def error(self, code: int) -> str:
        """The one line of all ranks; the job ends with this code, and nothing else looks like a
        failure."""
        assert self.returncode == code and len(self.errors) == 1, str(self)
        assert "Traceback" not in self.stderr + self.stdout, str(self)
        return self.errors[0].removeprefix("axsparse: error: ")

    def __str__(self) -> str:
        killed = ", killed" if self.returncode < 0 else ""
        return (
            f"exit code {self.returncode} after {self.seconds:.1f} s{killed}\n"
            f"--- stdout of all ranks\n{self.stdout}\n--- stderr of all ranks\n{self.stderr}"
        )


def mpirun_path() -> str:
    """The launcher that belongs to this Python's MPI library, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return str(beside)
    found = shutil.which("mpirun")
    assert found is not None, "no mpirun beside this Python nor on PATH; pip install mpich"
    return found


def run_mpirun(
    ranks: int,
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = LONGEST_SECONDS,
    cwd: Path | None = None,
    python: str | None = None,
) -> Finished:
    """`mpirun -n ranks python args…`, in a process group that is killed after `timeout` seconds.

    The ranks have torch loaded when they start, unless `python` is `sys.executable`.
    """
    command = [mpirun_path(), "-n", str(ranks), python or warm_python(), *args]
    return _run(command, env, timeout, cwd)


def run_alone(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = LONGEST_SECONDS,
    cwd: Path | None = None,
    python: str | None = None,
) -> Finished:
    """`python args…`, likewise: one rank, which needs no MPI library."""
    return _run([python or warm_python(), *args], env, timeout, cwd)


def run_fresh(*args: str, env: Mapping[str, str] | None = None) -> Finished:
    """`python args…` in an interpreter that has loaded nothing yet."""
    return run_alone(args, env, python=sys.executable)


def ranks_of(run_dir: Path) -> Iterator[int]:
    """The processes of a run's ranks; launchers start them in separate sessions."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if str(run_dir).encode() in words and words[0] == sys.executable.encode():
                yield int(entry.name)


def shared_memory(process: int) -> set[Path]:
    """The files of shared memory that a process maps."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        return {Path(line.split()[-1]) for line in lines if f"{SHARED}/" in line}
    return set()


def _run(
    command: Sequence[str], env: Mapping[str, str] | None, timeout: float, cwd: Path | None
) -> Finished:
    began = time.monotonic()
    # Files, since a rank that outlives the launcher would keep a pipe open.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        returncode = process.wait()
        seconds = time.monotonic() - began
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Finished(returncode, texts[0], texts[1], seconds)
