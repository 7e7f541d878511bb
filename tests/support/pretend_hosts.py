"""Hosts that are not there: launch agents on this machine, which can die, hang and come back.

    pretend_hosts.py start FOLDER … HOST COMMAND    runs the command of a launcher "on" HOST
    pretend_hosts.py ping FOLDER HOST               succeeds if HOST lives

The processes of a host have its name in their environment, or descend from one that has. A file
HOST.down in FOLDER says that the host is away: no command is started there, and none answers.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "PRETEND_HOST"
NETWORK = {
    "UCX_TLS": "self,sm,tcp",
    "UCX_NET_DEVICES": "lo",
    "OMPI_MCA_btl": "self,sm,tcp",
}
"""The environment in which ranks of different hosts talk by this machine's own network."""
AWAY = 255
"""What ssh exits with where it reaches nobody."""


@dataclass(frozen=True)
class PretendHosts:
    """Hosts whose agents leave their marks in a folder."""

    folder: Path

    def launcher(self, mpirun: str) -> str:
        """The value of MPIRUN that starts ranks by agents, of MPICH or Open MPI."""
        agent = self.folder / "agent"
        words = [sys.executable, "-IS", str(Path(__file__).resolve()), "start", str(self.folder)]
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        agent.chmod(0o755)
        if "openmpi" in mpirun:
            return shlex.join([mpirun, "--prtemca", "plm_ssh_agent", str(agent)])
        return shlex.join([mpirun, "-launcher", "ssh", "-launcher-exec", str(agent)])

    def probe(self) -> str:
        """The value of `--probe`."""
        words = [sys.executable, "-IS", str(Path(__file__).resolve()), "ping", str(self.folder)]
        return shlex.join([*words, "{host}"])

    def die(self, host: str) -> None:
        """All processes of the host end at once, and it stays away."""
        (self.folder / f"{host}.down").touch()
        self.lose_processes(host)

    def lose_processes(self, host: str) -> None:
        """All processes of the host end at once, and it goes on answering."""
        self._signal(host, signal.SIGKILL)

    def hang(self, host: str) -> None:
        """All processes of the host stand still, and it answers nobody."""
        (self.folder / f"{host}.down").touch()
        self._signal(host, signal.SIGSTOP)

    def come_back(self, host: str) -> None:
        """The host answers again, and what stood still there goes on."""
        (self.folder / f"{host}.down").unlink(missing_ok=True)
        self._signal(host, signal.SIGCONT)

    def is_away(self, host: str) -> bool:
        return (self.folder / f"{host}.down").exists()

    def processes(self, host: str) -> list[int]:
        """The processes of all commands that were started on a host."""
        mark = f"{MARK}={self.folder}/{host}".encode()
        found, children = set(), defaultdict(set)
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError):
                if entry.name.isdigit():
                    process = int(entry.name)
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    children[int(fields[1])].add(process)
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(process)
        # Open MPI gives ranks another environment.
        new = found
        while new := {child for one in new for child in children[one]} - found:
            found |= new
        return sorted(found)

    def ranks(self, host: str, word: str = "axsparse.train") -> list[int]:
        """The ranks of a host, and the processes beside them."""
        return [process for process in self.processes(host) if word in _command_of(process)]

    def _signal(self, host: str, number: int) -> None:
        # Twice, since processes may be started meanwhile.
        for _ in range(2):
            for process in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(0.01)


def _command_of(process: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    return []


def main(arguments: Sequence[str]) -> int:
    what, folder, *rest = arguments
    if what == "ping":
        return AWAY if (Path(folder) / f"{rest[0]}.down").exists() else 0
    words = list(rest)
    while words[0].startswith("-"):  # options of ssh
        words.pop(0)
    host, *command = words
    if (Path(folder) / f"{host}.down").exists():
        return AWAY
    # This process is the ssh that is on the launcher's own host.
    if os.fork() == 0:
        os.setsid()
        os.environ[MARK] = f"{folder}/{host}"
        os.execv("/bin/sh", ["sh", "-c", " ".join(command)])  # noqa: S606 - as sshd does
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
