"""The control groups of Linux that this process is in, whose limits hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""A line for each hierarchy: its number, its controllers (none in version 2), the group's path."""


def folders(controller: str, cgroup: Path = CGROUP, own: Path = OWN) -> Iterator[Path]:
    """The folders of the groups of a controller, such as "memory", from the process's own group up
    to the root, in versions 2 and 1. A container may see its own group as the root."""
    yield from (cgroup, cgroup / controller)
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, group = cgroup / controller if controllers else cgroup, Path(path.lstrip("/"))
        if ".." not in group.parts:  # a group outside the container
            yield from (root / each for each in (group, *group.parents))
