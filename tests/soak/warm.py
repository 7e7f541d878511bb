"""Ranks that start in milliseconds: `python warm.py SOCKET` has loaded torch, and forks them.

The launcher starts `stub.py` as a rank. That sends its arguments, environment and open files
here, and a fork becomes the training with them; MPI starts in the fork. Each ends with the
other: if the rank is killed, the stub kills itself alike, and if the stub is, the rank is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from soak import soaked

MAX_FILES = 200
MAX_BYTES = 1 << 20


class Warm:
    """The forks that live, by the connection to their stub."""

    def __init__(self, path: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        self._ranks: dict[socket.socket, int] = {}
        # So that a rank's end is seen at once.
        self._woken, waking = socket.socketpair()
        waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        self._waking = waking

    def serve(self) -> NoReturn:
        """Until this process is killed."""
        while True:
            ready, _, _ = select.select([self._listening, self._woken, *self._ranks], [], [])
            for connection in ready:
                if connection is self._listening:
                    self._fork(self._listening.accept()[0])
                elif connection is self._woken:
                    self._woken.recv(4096)
                elif connection in self._ranks:  # it says nothing more: it is gone
                    os.kill(self._ranks[connection], signal.SIGKILL)
                    os.waitpid(self._ranks.pop(connection), 0)
                    connection.close()
            for connection, process in [*self._ranks.items()]:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    del self._ranks[connection]
                    with contextlib.suppress(OSError):
                        connection.send(status.to_bytes(4, "big"))
                    connection.close()

    def _fork(self, connection: socket.socket) -> None:
        sent, files, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_FILES)
        process = os.fork() if sent else 0
        if process:
            for number in files:
                os.close(number)
            self._ranks[connection] = process
        elif sent:
            self._become(json.loads(sent), files)
        else:
            connection.close()

    def _become(self, asked: dict[str, object], files: list[int]) -> NoReturn:
        """The rank that a stub asked for."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        high = [os.dup2(number, 500 + place) for place, number in enumerate(files)]
        os.closerange(3, 500)
        numbers, words, environment = asked["files"], asked["words"], asked["environment"]
        assert isinstance(numbers, list) and isinstance(words, list)
        assert isinstance(environment, dict)
        for number, wanted in zip(high, numbers, strict=True):
            os.dup2(number, wanted)
            os.set_inheritable(wanted, True)
        os.closerange(500, 500 + MAX_FILES)
        # Python has looked at what they were before.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        code = 1
        try:
            soaked.train(words)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            soaked.end_mpi()
            os._exit(code)


def rehearse() -> None:
    """Train, save and resume once, so that all that is ever loaded or compiled is."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        soaked.rehearse(Path(folder) / "run")
    assert threading.active_count() == 1, "a fork would miss them"


if __name__ == "__main__":
    rehearse()
    Warm(sys.argv[1]).serve()
