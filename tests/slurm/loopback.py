"""A SLURM cluster of one node on this machine, for as long as the tests run. Debian, as root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CORES = 8
"""Told to SLURM, whatever the machine has."""
LIMIT_SECONDS = 60
PACKAGES = ("slurm-wlm", "munge")
HOSTS = Path("/etc/hosts")
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=300
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:2
"""


@contextlib.contextmanager
def loopback(folder: Path) -> Iterator[None]:
    """Install SLURM if need be, start it, and stop it at the end; SLURM_CONF names it meanwhile."""
    assert os.geteuid() == 0, "SLURM on one machine has to be started as root"
    _install()
    with contextlib.ExitStack() as later:
        later.enter_context(_host_on_loopback())
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=_host(), folder=folder, cores=CORES))
        os.environ["SLURM_CONF"] = str(conf)
        later.callback(os.environ.pop, "SLURM_CONF")
        if not MUNGE_SOCKET.exists():
            later.enter_context(_munged())
        for daemon in ("slurmctld", "slurmd"):
            # In the foreground, so that they are ours to end.
            later.enter_context(_running([daemon, "-D"], folder / f"{daemon}.out"))
        _wait_until(lambda: _says("sinfo", "-h", "-o", "%T") == "idle", "the node to be idle")
        try:
            yield
        finally:
            # Jobs of a test that failed would outlive the daemons.
            _says("scancel", "--quiet", "--user=root")
            _wait_until(lambda: not _says("squeue", "-h"), "jobs to end")


def state_of(job: str) -> str:
    """A job's state, and the reason of it; of a chain, of all that are left."""
    return _says("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T %r")


def wait_for_end(job: str, seconds: float) -> None:
    """Until no part of a job waits or runs."""
    _wait_until(
        lambda: not _says("squeue", "-h", "-j", job, "-o", "%T"), f"job {job} to end", seconds
    )


def exit_codes(job: str) -> dict[str, str]:
    """JobState and ExitCode of each part of a job that SLURM still remembers."""
    shown = _says("scontrol", "--oneliner", "show", "job", job)
    found = {}
    for line in shown.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        part = fields.get("ArrayTaskId", fields["JobId"])
        found[part] = f"{fields['JobState']} {fields['ExitCode']}"
    return found


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
        _wait_until(MUNGE_SOCKET.exists, "munged to listen")
        yield


@contextlib.contextmanager
def _running(command: list[str], out: Path) -> Iterator[None]:
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _says(*command: str) -> str:
    """What a command prints; nothing if it fails, as it does for jobs that are forgotten."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _wait_until(done: object, what: str, seconds: float = LIMIT_SECONDS) -> None:
    assert callable(done)
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.5)
