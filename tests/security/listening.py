"""A rank that trains a step and writes to a separate file which of its sockets listen to whom."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support.runs import mlp, tiny_config, train_here, vector_data

from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as the kernel writes them."""


def open_to_others() -> list[str]:
    """The addresses beyond loopback that sockets of this process listen on; what it has from the
    launcher is the launcher's."""
    own = set(sockets("self")) - set(sockets(str(os.getppid())))
    found = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *rest = line.split()
            is_loopback = local.partition(":")[0] in LOOPBACK
            if state == LISTENING and f"socket:[{rest[5]}]" in own and not is_loopback:
                found.append(local)
    return found


def sockets(process: str) -> Iterator[str]:
    """The targets of the open files of a process."""
    for number in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield str(number.readlink())


def main(job: Job) -> None:
    train_here(job.transport, Grid(2, 1), mlp(), tiny_config(train={"steps": 1}), vector_data(30))
    Path(sys.argv[1], str(job.transport.rank)).write_text(json.dumps(open_to_others()))


if __name__ == "__main__":
    run(main)
