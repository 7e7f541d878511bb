"""The lifeline of a rank: a small process beside it, which tells `axsparse launch` that it lives.

The process is a fork of the rank from before any library is loaded. A thread could not do its
work: no thread of Python runs while the rank starts MPI or loads a library. The process sends a
datagram a second, and one more whenever the rank comes to another phase or has ended. In return it
ends the rank if the supervisor has given this attempt up, so that a host that comes back to life
writes nothing beside the attempt that took its place. And it lets the rank save and stop if there
is no supervisor any more.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime.launcher import LAUNCHER_VARIABLES

SUPERVISOR = "AXSPARSE_SUPERVISOR"
"""The environment variable by which a supervisor tells its ranks about itself, as HOST/PORT/TOKEN
and the number of the attempt. A rank that has it takes no lock: the supervisor holds it."""
SRUN_RANK = "SLURM_PROCID"
"""Where srun says which rank a process is, if no MPI library's own variable does."""
BEAT_SECONDS = 1.0
"""The time between two datagrams."""
LEAVE = b"leave"
"""What the supervisor answers to ranks of an attempt that it has given up."""
SAVING_SECONDS = 300.0
"""How long a rank without a supervisor may take to save; then it is ended."""
STARTS, JOINS, BUILDS, TRAINS, STEPS, ENDS = PHASES = (
    *("starts", "joins", "builds"),
    *("trains", "steps", "ends"),
)
"""What a rank does: it loads libraries, starts MPI, builds or reads its state, makes its first
step, makes further ones, and leaves in order."""
RUNS, STOPPED, GONE = "runs", "stopped", "gone"
"""What the system says of a rank's process; stopped is by a signal or a debugger."""
_STEP = struct.Struct("=q")


@dataclass(frozen=True)
class Beat:
    """What a datagram says of a rank."""

    token: str
    attempt: int
    rank: int
    process: str
    """One of RUNS, STOPPED and GONE."""
    phase: str
    step: int
    """Steps done, once the rank trains."""

    def encode(self) -> bytes:
        """The datagram."""
        words = (self.token, self.attempt, self.rank, self.process, self.phase, self.step)
        return " ".join(map(str, words)).encode()

    @classmethod
    def decode(cls, datagram: bytes) -> Beat | None:
        """What a datagram says; None for one that is not ours."""
        try:
            token, attempt, rank, process, phase, step = datagram.decode("ascii").split()
            if process not in (RUNS, STOPPED, GONE) or phase not in PHASES:
                return None
            return cls(token, int(attempt), int(rank), process, phase, int(step))
        except ValueError:
            return None


class Lifeline:
    """The rank's end of its lifeline; without a supervisor it does nothing."""

    def __init__(self, pipe: int | None = None, step: mmap.mmap | None = None) -> None:
        """`pipe` takes the names of phases, and `step` is memory that both processes see."""
        self._pipe = pipe
        self._step = step

    @classmethod
    def begin(cls, environment: Mapping[str, str] = os.environ) -> Lifeline:
        """Start the process beside this rank, if a supervisor started the rank.

        No thread may run yet, since the process is a fork of this one.
        """
        named = environment.get(SUPERVISOR)
        if named is None:
            return cls()
        host, port, token, attempt = named.split("/")
        names = [name for name in (*LAUNCHER_VARIABLES, SRUN_RANK) if name in environment]
        rank = int(environment[names[0]]) if names else 0
        beat = Beat(token, int(attempt), rank, RUNS, STARTS, 0)
        step, parent = mmap.mmap(-1, _STEP.size), os.getpid()
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.close(writer)
                _Sender(reader, step, parent, (host, int(port))).run(beat)
            finally:
                os._exit(0)
        os.close(reader)
        os.set_blocking(writer, False)
        return cls(writer, step)

    def at(self, phase: str) -> None:
        """Tell that the rank comes to a phase, one of PHASES."""
        if self._pipe is not None:
            with suppress(OSError):  # whoever killed the other process wants no signs of life
                os.write(self._pipe, f"{phase}\n".encode())

    def after(self, step: int) -> None:
        """Note how many steps are done; the next datagram tells it."""
        if self._step is not None:
            _STEP.pack_into(self._step, 0, step)


class _Sender:
    """The process beside a rank."""

    def __init__(self, reader: int, step: mmap.mmap, parent: int, address: tuple[str, int]) -> None:
        """`reader` is the end of the pipe that the rank writes to, which closes with the rank."""
        # What ends the rank is not meant for this process, which ends when the rank has: neither
        # signals, nor the end of the rank's process group by its launcher.
        os.setsid()
        for number in (
            *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            *(signal.SIGUSR1, signal.SIGUSR2),
        ):
            signal.signal(number, signal.SIG_IGN)
        self._reader = reader
        self._step = step
        self._parent = parent
        # A launcher learns of the end of a rank by the end of the pipes that it gave to the rank.
        os.closerange(0, reader)
        os.closerange(reader + 1, 4096)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._address = address
        self._lost_at: float | None = None

    def run(self, beat: Beat) -> None:
        """Send until the rank has ended."""
        with suppress(OSError):  # a name may not resolve for a moment
            self._socket.connect(self._address)
        phase, text = beat.phase, b""
        while True:
            [step] = _STEP.unpack_from(self._step, 0)
            beat = Beat(beat.token, beat.attempt, beat.rank, _state_of(self._parent), phase, step)
            self._send(beat)
            due = time.monotonic() + BEAT_SECONDS
            while phase == beat.phase and (left := due - time.monotonic()) > 0:
                ready, _, _ = select.select([self._reader, self._socket.fileno()], [], [], left)
                if self._socket.fileno() in ready:
                    self._hear(beat.token)
                if self._reader in ready:
                    more = os.read(self._reader, 4096)
                    if not more:
                        self._say_farewell(beat)
                        return
                    text += more
                    *lines, text = text.split(b"\n")
                    phase = lines[-1].decode() if lines else phase

    def _say_farewell(self, beat: Beat) -> None:
        """Tell that the rank is gone, three times, since a datagram may be lost."""
        [step] = _STEP.unpack_from(self._step, 0)
        gone = Beat(beat.token, beat.attempt, beat.rank, GONE, beat.phase, step)
        for _ in range(3):
            self._send(gone)
            time.sleep(0.02)

    def _send(self, beat: Beat) -> None:
        try:
            self._socket.send(beat.encode())
        except ConnectionRefusedError:
            self._leave_without_supervisor()
        except OSError:  # a network may be away for a while
            with suppress(OSError):
                self._socket.connect(self._address)

    def _hear(self, token: str) -> None:
        """End the rank if the supervisor says so."""
        try:
            answer = self._socket.recv(256)
        except ConnectionRefusedError:
            self._leave_without_supervisor()
        except OSError:
            return
        else:
            self._lost_at = None
            if answer == LEAVE + b" " + token.encode():
                self._end_rank(signal.SIGKILL)

    def _leave_without_supervisor(self) -> None:
        """Let the rank save and stop: nothing listens at the supervisor's port any more."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            self._end_rank(signal.SIGUSR1)
        elif now - self._lost_at > SAVING_SECONDS:
            self._end_rank(signal.SIGKILL)

    def _end_rank(self, number: int) -> None:
        if os.getppid() == self._parent:  # else its number may be another process's by now
            with suppress(ProcessLookupError):
                os.kill(self._parent, number)


def _state_of(process: int) -> str:
    """Whether a process is stopped, where the system has files that say so."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return RUNS
    return STOPPED if state in ("T", "t") else RUNS
