"""Seconds from the death of a host to the next step, and how they grow with ranks.

    python restarts.py [--ranks 8 32 128 512]

The supervisor of `axsparse launch` runs as it is. Its launcher is this script, which stands in for
all ranks, eight a host: it sends the datagrams of their lifelines, lets a host fall silent after
its first steps, and ends the others when the supervisor says so. So the part that grows with ranks
is measured without so many processes: noticing, ending, deciding and the next start of the
launcher. What ranks do themselves (libraries, MPI, checkpoint, first step) each does beside the
others on a machine of its own; tests/soak/restarting.py measures it with real ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from axsparse.runtime.restarts.lifeline import (
    ENDS,
    GONE,
    LEAVE,
    PHASES,
    RUNS,
    STEPS,
    SUPERVISOR,
    Beat,
)

RANKS_PER_HOST = 8
SECONDS_BEFORE_DEATH = 3.0


def stand_in(words: list[str]) -> int:
    """The launcher: all ranks of an attempt, of which the second host dies in the first attempt."""
    count = int(words[words.index("-n") + 1])
    named = next(word for word in words if word.startswith(f"{SUPERVISOR}="))
    host, port, token, attempt = named.partition("=")[2].split("/")
    sockets = []
    for _ in range(count):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.connect((host, int(port)))
        one.setblocking(False)
        sockets.append(one)
    selector = selectors.DefaultSelector()
    for rank, one in enumerate(sockets):
        selector.register(one, selectors.EVENT_READ, rank)

    def tell(rank: int, phase: str, process: str = RUNS) -> None:
        sockets[rank].send(Beat(token, int(attempt), rank, process, phase, 1).encode())

    for phase in PHASES[:-1]:
        for rank in range(count):
            tell(rank, phase)
    is_first = attempt == "0"
    began, live = time.monotonic(), set(range(count))
    if not is_first:
        time.sleep(1.0)
        for rank in live:
            tell(rank, ENDS)
        return 0
    dead = set(range(RANKS_PER_HOST, 2 * RANKS_PER_HOST))
    due = [began + rank / count for rank in range(count)]
    while live:
        now = time.monotonic()
        if now - began > SECONDS_BEFORE_DEATH:
            live -= dead
        for rank in live:
            if due[rank] <= now:
                tell(rank, STEPS)
                due[rank] += 1.0
        for key, _ in selector.select(0.005):
            answer = sockets[key.data].recv(256)
            if answer.startswith(LEAVE) and key.data in live:
                live.discard(key.data)
                tell(key.data, STEPS, GONE)
    return 137


def measure(ranks: int) -> dict[str, float]:
    """The seconds of one death, and the CPU seconds of the supervisor in each second of the run."""
    with tempfile.TemporaryDirectory() as place:
        launcher = Path(place) / "mpirun"
        (Path(place) / "run").mkdir()
        launcher.write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} stand-in "$@"\n'
        )
        launcher.chmod(0o755)
        hosts = ",".join(f"host{n}:{RANKS_PER_HOST}" for n in range(ranks // RANKS_PER_HOST))
        words = ["--hosts", hosts, "--probe", "true", str(ranks), "--config", "quickstart.yaml"]
        more = ["--set", "batch.global_batch_size=1024", "--run-dir", "run"]
        job = subprocess.Popen(  # noqa: S603 - no shell
            [sys.executable, "-m", "axsparse", "launch", *words, *more],
            cwd=place,
            env={**os.environ, "MPIRUN": str(launcher)},
            stderr=subprocess.DEVNULL,
        )
        used, seen, at = 0.0, [], time.monotonic()
        while job.poll() is None:
            now = time.monotonic()
            try:
                fields = Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()
                used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            except (OSError, IndexError):
                pass
            seen.append((now - at, used))
            time.sleep(0.2)
        lines = (Path(place) / "run" / "restarts.jsonl").read_text().splitlines()
        first, second = map(json.loads, lines)
        assert job.returncode == 0, job.returncode
        assert first["fault"]["hosts"] == ["host1"], first["fault"]
        assert sum(second["hosts"].values()) == ranks - RANKS_PER_HOST, second["hosts"]
    busy = [one for one in seen if one[0] > 3.0]
    return {
        "until it is noticed": first["noticed"] - first["died"],
        "until ranks and launcher have ended": first["ended"] - first["noticed"],
        "until the next launcher starts": second["began"] - first["ended"],
        "until all ranks are heard of": max(second["phases"].values()) - second["began"],
        "CPU of the supervisor a second": (busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0]),
    }


def main() -> None:
    if sys.argv[1:2] == ["stand-in"]:
        sys.exit(stand_in(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 512])
    arguments = parser.parse_args()
    rows = {ranks: measure(ranks) for ranks in arguments.ranks}
    print("| seconds |" + "".join(f" {ranks} ranks |" for ranks in rows))
    print("|---" * (len(rows) + 1) + "|")
    for name in next(iter(rows.values())):
        print(f"| {name} |" + "".join(f" {row[name]:.2f} |" for row in rows.values()))


if __name__ == "__main__":
    main()
