"""What the system says of this process and of the whole machine. Linux only."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def own_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS now, VmHWM at most, VmData reserved."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> None:
    """Let VmHWM begin anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def limit_private_memory(budget: int) -> None:
    """Refuse this process more than `budget` bytes of private memory beyond what it holds."""
    limit = own_bytes("VmData") + budget
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def machine_cpu_seconds() -> float:
    """Seconds that all cores together have worked, time that a host took from them included."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    user, nice, system, _, _, interrupts, soft, stolen = fields
    return (user + nice + system + interrupts + soft + stolen) / _TICKS
