"""A SLURM cluster of four nodes on this machine, for as long as the tests run. Debian, as root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CORES = 8
"""Cores of each node for SLURM, whatever the machine has."""
NODES = ("node1", "node2", "node3", "node4")
PORT = 17001
"""Of the first node; each has another, since all are this machine."""
END_SECONDS = 240.0
PACKAGES = ("slurm-wlm", "munge")
HOSTS = Path("/etc/hosts")
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
CONF = Path(__file__).with_name("loopback.conf").read_text(encoding="utf-8")


class Cluster:
    """The nodes, each a separate slurmd."""

    def __init__(self, folder: Path, later: contextlib.ExitStack) -> None:
        self._folder = folder
        self._later = later
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        """Let a node join, or come back."""
        daemon = _running(["slurmd", "-D", "-N", node], self._folder / f"{node}.out")
        self._daemons[node] = self._later.enter_context(daemon)

    def kill(self, node: str) -> None:
        ranks = _processes_on(node)
        steps = {parent for rank in ranks if (parent := _step_of(rank)) is not None}
        for process in (self._daemons[node].pid, *steps, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._daemons[node].wait()

    def kill_rank(self, node: str, name: str) -> None:
        """Kill one process on a node, of those whose command line has a name in it."""
        for process in _processes_on(node):
            with contextlib.suppress(OSError):
                if name.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                    os.kill(process, signal.SIGKILL)
                    return
        raise AssertionError(f"no {name} on {node}")


def _processes_on(node: str) -> list[int]:
    """The processes that SLURM has started on a node."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _step_of(process: int) -> int | None:
    """The slurmstepd that has started a process, if its parent is one."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        parent = int(stat.rpartition(")")[2].split()[1])
        if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return parent
    return None


@contextlib.contextmanager
def loopback(folder: Path) -> Iterator[Cluster]:
    """Install SLURM if need be, start it, and stop it at the end; SLURM_CONF names it meanwhile."""
    assert os.geteuid() == 0, "SLURM on one machine has to be started as root"
    _install()
    with contextlib.ExitStack() as later:
        later.enter_context(_host_on_loopback())
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        conf = folder / "slurm.conf"
        lines = "\n".join(
            f"NodeName={node} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port} CPUs={CORES} "
            "State=UNKNOWN"
            for port, node in enumerate(NODES, PORT)
        )
        conf.write_text(CONF.format(host=_host(), folder=folder, nodes=lines))
        os.environ["SLURM_CONF"] = str(conf)
        later.callback(os.environ.pop, "SLURM_CONF")
        if not MUNGE_SOCKET.exists():
            later.enter_context(_munged())
        # In the foreground, so that they are ours to end.
        later.enter_context(_running(["slurmctld", "-D"], folder / "slurmctld.out"))
        cluster = Cluster(folder, later)
        for node in NODES:
            cluster.start(node)
        wait_until(lambda: _says("sinfo", "-h", "-o", "%T") == "idle", "all nodes to be idle")
        try:
            yield cluster
        finally:
            # Jobs of a test that failed would outlive the daemons.
            _says("scancel", "--quiet", "--user=root")
            wait_until(lambda: not _says("squeue", "-h"), "jobs to end")


def wait_for_end(job: str, seconds: float) -> None:
    """Until no part of a job waits or runs."""
    wait_until(
        lambda: not _says("squeue", "-h", "-j", job, "-o", "%T"), f"job {job} to end", seconds
    )


def exit_code(job: str) -> str:
    """JobState and ExitCode of a job that SLURM still remembers."""
    words = _says("scontrol", "--oneliner", "show", "job", job).split()
    fields = dict(word.partition("=")[::2] for word in words)
    return f"{fields['JobState']} {fields['ExitCode']}"


def _install() -> None:
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-y", "-q", "--no-install-recommends"]
    subprocess.run(["apt-get", "update", "-q"], env=quiet, check=True)
    subprocess.run(["apt-get", "install", *options, *PACKAGES], env=quiet, check=True)


def _host() -> str:
    return socket.gethostname().partition(".")[0]


@contextlib.contextmanager
def _host_on_loopback() -> Iterator[None]:
    before = HOSTS.read_text()
    if f"127.0.0.1 {_host()}" not in before.replace("\t", " "):
        HOSTS.write_text(f"{before.rstrip()}\n127.0.0.1 {_host()}\n")
        try:
            yield
        finally:
            HOSTS.write_text(before)
    else:
        yield


@contextlib.contextmanager
def _munged() -> Iterator[None]:
    user = pwd.getpwnam("munge")
    for path, mode in (("/run/munge", 0o755), ("/var/log/munge", 0o700), ("/var/lib/munge", 0o700)):
        Path(path).mkdir(exist_ok=True)
        Path(path).chmod(mode)
        os.chown(path, user.pw_uid, user.pw_gid)
    command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    with _running([*command, "munged", "--foreground"], Path("/run/munge/munged.out")):
        wait_until(MUNGE_SOCKET.exists, "munged to listen")
        yield


@contextlib.contextmanager
def _running(command: list[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _says(*command: str) -> str:
    """The output of a command; nothing if it fails, as it does for jobs that are forgotten."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def wait_until(done: Callable[[], object], what: str, seconds: float = END_SECONDS) -> None:
    """Until something is so; AssertionError if that takes too long."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.5)
