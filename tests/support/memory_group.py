"""A control group whose memory is limited, in which a test runs commands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from axsparse.runtime import machine


@contextmanager
def memory_group(nbytes: int) -> Iterator[list[str]]:
    """Words before a command that start it in a new group of so many bytes, below the group of this
    process; skips the test where no such group can be made."""
    folder = _own_group() / f"axsparse-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as reason:
        pytest.skip(f"no control group can be made here ({reason})")
    try:
        try:
            (folder / "memory.limit_in_bytes").write_text(str(nbytes))
        except OSError as reason:
            pytest.skip(f"memory cannot be limited here ({reason})")
        enter = f'echo $$ > "{folder / "cgroup.procs"}" && exec "$@"'
        yield ["sh", "-c", enter, "sh"]
    finally:
        _removed(folder)


def _own_group() -> Path:
    """The memory group of this process in version 1, the only one in which a group that contains
    processes may have limited groups below it."""
    for line in machine.OWN.read_text().splitlines() if machine.OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return machine.CGROUP / "memory" / path.lstrip("/")
    pytest.skip("no memory controller of version 1 of control groups")


def _removed(folder: Path) -> None:
    """Remove the group as soon as the system has noted that its processes have ended."""
    for _ in range(500):
        with suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} still has processes")
