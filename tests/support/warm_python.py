"""A `python` and an `axsparse` that begin with torch loaded, which else takes each process seconds.

A test that is about the start of a process, its memory or its own libraries takes `sys.executable`.
"""

from __future__ import annotations

import atexit
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SHARED = "AXSPARSE_WARM_FOLDER"
"""Names the folder of a server that the workers of pytest share."""


@cache
def warm_folder() -> Path:
    """A folder with both commands, for PATH; their server is started once a process."""
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address = folder / "socket"
    can_serve = hasattr(os, "pidfd_open")  # Linux
    client = [sys.executable, "-IS", str(HERE / "warm_client.py"), str(address)]
    for name, words in (("python", []), ("axsparse", ["-m", "axsparse"])):
        command = shlex.join([*(client if can_serve else ()), sys.executable, *words])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    if not can_serve:
        return folder
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, str(HERE / "warm_server.py"), str(listening.fileno()), str(folder)],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    atexit.register(server.communicate)  # closes its stdin, by which it ends
    return folder


def warm_python() -> str:
    return str(warm_folder() / "python")
