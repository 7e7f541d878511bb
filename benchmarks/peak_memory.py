"""Peak memory of a command and all its processes, shared pages counted once.

    python benchmarks/peak_memory.py --json out.json -- mpirun -n 2 python -m axsparse.train …

Sums the proportional set sizes (PSS) of the process tree every second, from outside. The
peak between two samples is missed; `VmHWM` of the largest process bounds what that hides.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 1.0


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        found.append(process)
        todo += children.get(process, [])
    return found


def field(process: int, file: str, name: str) -> int:
    """Bytes of a "Name:   123 kB" line; 0 if the process is gone."""
    try:
        for line in (Path("/proc") / str(process) / file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def measure(command: list[str]) -> dict[str, Any]:
    """Run the command and sample it; how it ended, how long it took, and its peaks."""
    began = time.monotonic()
    process = subprocess.Popen(command)  # noqa: S603 - the user's own command
    peak = at = highest = 0.0
    samples = 0
    while process.poll() is None:
        processes = tree(process.pid)
        total = sum(field(p, "smaps_rollup", "Pss") for p in processes)
        if total > peak:
            peak, at = total, time.monotonic() - began
        highest = max([highest, *(field(p, "status", "VmHWM") for p in processes)])
        samples += 1
        time.sleep(SECONDS)
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "peak_pss_bytes": int(peak),
        "peak_after_seconds": round(at, 1),
        "largest_process_hwm_bytes": int(highest),
        "samples": samples,
    }


def main() -> int:
    """Run the command, sample, report; returns the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the result goes beside the screen")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    result = {
        "command": arguments.command,
        **measure(arguments.command),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
    }
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text, file=sys.stderr)
    return int(result["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
