"""Lets the hosts of a run die, hang and come back at random under `axsparse launch`.

    python tests/soak/restarting.py --events 20

The hosts are launch agents on this machine (`support/pretend_hosts.py`), each with two ranks. An
event happens to a host at a random moment, also while ranks start, read or save: all its processes
are killed, or stand still, or one of its ranks is killed, or all hosts die at once. Hosts that are
away come back at random, and such that the next attempt has another number of ranks. The run that
comes to its end is compared with one process that nobody touched: `axsparse compare` has to find
the same bits, and the files of the last checkpoint have to be the same. Exits with 1 at the first
thing that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from support.mpirun import ENVIRONMENT, mpirun_path
from support.pretend_hosts import NETWORK, PretendHosts

KINDS = {"die": 8, "hang": 8, "rank": 3, "all": 1}
"""What happens, and how often."""
LIMIT_SECONDS = 600.0
"""How long nothing may happen."""
PLACED = re.compile(r"^axsparse: restart \d+ of \d+: ranks(.*)", re.MULTILINE)
STARTED = re.compile(r"^axsparse: restart (\d+) of ", re.MULTILINE)
PHASES = ("starts", "joins", "builds", "trains", "steps")


class WrongError(Exception):
    """What must not happen."""


class Soak:
    """One run under a supervisor, and what befalls its hosts."""

    def __init__(self, arguments: argparse.Namespace, place: Path, seed: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # no secret
        self.place = place
        self.run_dir = place / "run"
        self.train = ["--config", arguments.config, "--set", f"train.steps={arguments.steps}"]
        for pair in ("samo.gradient=exact", "checkpoint.every=5", *arguments.set):
            self.train += ["--set", pair]
        (place / "hosts").mkdir()
        self.hosts = PretendHosts(place / "hosts")
        self.names = [f"node{number}" for number in range(1, arguments.hosts + 1)]
        self.events: list[str] = []
        self._struck = -1
        """The attempt of the last event."""
        listed = ",".join(f"{name}:2" for name in self.names)
        self._log = (place / "launch.log").open("w+b")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "axsparse", "launch"),
                *("--restarts", str(5 * arguments.events), "--hosts", listed),
                *("--probe", self.hosts.probe(), str(2 * arguments.hosts)),
                *(*self.train, "--run-dir", str(self.run_dir)),
            ],
            cwd=place,
            env={
                **os.environ,
                **ENVIRONMENT,
                **NETWORK,
                "MPIRUN": self.hosts.launcher(mpirun_path()),
            },
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def said(self) -> str:
        return (self.place / "launch.log").read_text(errors="replace")

    def attempt(self) -> int:
        """The attempt under way."""
        return max((int(number) for number in STARTED.findall(self.said())), default=0)

    def step(self) -> int:
        """The newest step in the record."""
        with suppress(OSError, ValueError, IndexError, KeyError):
            return int(
                json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
            )
        return 0

    def event(self, steps: int) -> None:
        """Wait for a moment of the next attempt, and let something happen to its hosts."""
        self._wait_for(lambda: self.attempt() > self._struck)
        before = self._struck = self.attempt()
        if self.draw.random() < 0.3:
            self._sleep(self.draw.uniform(0.0, 25.0))  # it falls on a start
        else:
            target = self.step() + self.draw.randint(1, max(2, steps))
            self._wait_for(lambda: self.step() >= target)
            self._sleep(self.draw.uniform(0.0, 1.0))
        self._let_some_come_back()
        up = [name for name in self._placed() if not self.hosts.is_away(name)]
        kind = self.draw.choices([*KINDS], [*KINDS.values()])[0]
        victims = up if kind == "all" else [self.draw.choice(up)]
        done = self.step()
        for name in victims:
            if kind == "rank":
                ranks = self.hosts.ranks(name)
                for process in ranks[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            else:
                (self.hosts.hang if kind == "hang" else self.hosts.die)(name)
        if kind != "all":
            self._change_shape(victims)
        self.events.append(kind)
        print(
            f"{len(self.events)}: {kind} {' '.join(victims)} in attempt {before}, step {done}",
            flush=True,
        )
        if all(self.hosts.is_away(name) for name in self.names):
            self._sleep(self.draw.uniform(1.0, 5.0))
            for name in self.draw.sample(self.names, 2 if len(self._placed()) == 1 else 1):
                self.hosts.come_back(name)

    def _placed(self) -> list[str]:
        """The hosts of the attempt under way."""
        started = PLACED.findall(self.said())
        return re.findall(r" on (\w+)", started[-1]) if started else self.names

    def _change_shape(self, victims: list[str]) -> None:
        """See to it that the next attempt has another number of hosts than this one."""
        up = [name for name in self.names if not self.hosts.is_away(name)]
        if len(up) != len(self._placed()):
            return
        others = [name for name in self.names if name not in (*up, *victims)]
        if others:
            self.hosts.come_back(others[0])
        else:
            self.hosts.die(self.draw.choice(up))

    def _let_some_come_back(self) -> None:
        away = [name for name in self.names if self.hosts.is_away(name)]
        for name in away:
            if self.draw.random() < 0.6 or len(away) == len(self.names):
                self.hosts.come_back(name)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._wait_for(lambda: time.monotonic() >= end)

    def _wait_for(self, has_come: Any) -> None:
        began = time.monotonic()
        while not has_come():
            if self.process.poll() is not None:
                raise WrongError(f"ended with {self.process.returncode}")
            if time.monotonic() - began > LIMIT_SECONDS:
                raise WrongError("hangs")
            time.sleep(0.05)

    def finish(self, whole: Path) -> str:
        """Let the run come to its end, and compare it."""
        code = self.process.wait(3 * LIMIT_SECONDS)
        if code != 0:
            raise WrongError(f"ended with {code}")
        for name in self.names:
            self.hosts.come_back(name)
        command = [sys.executable, "-m", "axsparse", "compare", str(self.run_dir), str(whole)]
        compared = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
        )
        if compared.returncode != 0:
            raise WrongError(compared.stdout + compared.stderr)
        return compared.stdout.strip() + "; " + self._same_files(whole)

    def _same_files(self, whole: Path) -> str:
        """The files of the last checkpoint, which have to be those of the other run."""
        mine, theirs = (
            max((run / "checkpoints").glob("step-*"), key=_step) for run in (self.run_dir, whole)
        )
        names = sorted(path.name for path in theirs.glob("*.safetensors"))
        if mine.name != theirs.name or sorted(p.name for p in mine.glob("*.safetensors")) != names:
            raise WrongError(f"{mine} has other files than {theirs}")
        for name in names:
            if (mine / name).read_bytes() != (theirs / name).read_bytes():
                raise WrongError(f"{mine / name} is not {theirs / name}")
        return f"{len(names)} files of {mine.name} are equal in every byte"

    def figures(self) -> str:
        """Seconds from each death to the next step, by phase."""
        lines = map(json.loads, (self.run_dir / "restarts.jsonl").read_text().splitlines())
        rows, shapes, died = [], [], None
        for line in lines:
            shapes.append(sum(line["hosts"].values()))
            if died is not None and "steps" in line["phases"]:
                marks = [died, line["began"], *(line["phases"][name] for name in PHASES)]
                rows.append([after - now for now, after in itertools.pairwise(marks)])
            died = line["died"]
        names = ("until the next start", "first sign", "libraries", "MPI", "checkpoint", "step")
        told = [f"{len(shapes)} attempts of {shapes} ranks"]
        for name, column in zip(
            (*names, "in all"), (*zip(*rows, strict=True), map(sum, rows)), strict=True
        ):
            values = sorted(column)
            told.append(f"  {name}: {median(values):.1f} s ({values[0]:.1f} to {values[-1]:.1f})")
        return "\n".join(told)


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


def untouched(soak: Soak) -> Path:
    """The run of one process, which nobody touches."""
    whole = soak.place / "whole"
    command = [sys.executable, "-m", "axsparse", "train", *soak.train, "--run-dir", str(whole)]
    done = subprocess.run(
        command, cwd=soak.place, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise WrongError(done.stdout + done.stderr)
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=4, help="each of two ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--config", default="quickstart.yaml")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int, help="of all that is drawn; another one each time")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    place = Path(tempfile.mkdtemp(prefix="restarting-"))
    print(f"seed {seed}, in {place}", flush=True)
    soak = Soak(arguments, place, seed)
    try:
        for number in range(arguments.events):
            left = arguments.steps - soak.step() - 2
            soak.event(left // (arguments.events - number))
        print(f"{soak.finish(untouched(soak))}\n{soak.figures()}")
    except (WrongError, subprocess.TimeoutExpired) as wrong:
        print(f"seed {seed}, {place}: {wrong}\n{soak.said()[-4000:]}", file=sys.stderr)
        return 1
    finally:
        if soak.process.poll() is None:
            soak.process.kill()
        for name in soak.names:
            for process in soak.hosts.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
