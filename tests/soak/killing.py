"""Kills a training again and again at random moments: `make soak CYCLES=200`.

Every cycle starts a run under a layout drawn anew, and kills one rank, or all and the launcher
(kill -9), while it starts, resumes, trains or saves; some cycles damage its newest checkpoint as
well. Each start has to continue from the newest complete checkpoint. A run that reaches its end is
compared with one that nobody touched: `axsparse compare` has to find the same bits. A third of the
runs change their number of replicas on the way, with exact sums of gradients, and all draw other
settings that change no bit for every start. Then the next run begins. Exits with 1 at the first
thing that is wrong. The last run is left to come to its end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soak.soaked import FREE, Told, told
from support.mpirun import ENVIRONMENT, mpirun_path

from axsparse.training.checkpoint.checkpoint_folder import (
    CHECKPOINTS,
    path_of,
    saved_steps,
    unfinished,
)
from axsparse.training.checkpoint.verification import is_complete

STEPS = 60
LAYOUTS = {
    1: ("1x1", "2x1", "2x1", "3x1", "4x1"),
    2: ("1x2", "1x2", "2x2"),
    3: ("1x3",),
    4: ("1x4",),
}
"""By number of replicas; fewer ranks start sooner."""
MIXED = (1, 2, 3, 4)
KINDS = ((1,), (2,), MIXED)
"""The numbers of replicas of runs: two of three keep theirs."""
MOMENTS = {"start-up": 1, "resuming": 2, "training": 4, "saving": 4}
"""How often each is aimed at."""
DAMAGED_EVERY = 8
"""On average, a cycle begins with a damaged checkpoint."""
OUTLIVES_SECONDS = 60.0
LIMIT_SECONDS = 300.0
CHOSEN = re.compile(r"^axsparse: goes on from .*/step-(\d+), after step \d+", re.MULTILINE)
FROM_START = re.compile(r"^axsparse: .*starts from the beginning$", re.MULTILINE)
MEMORY = "/dev/shm/"  # noqa: S108  # where MPI libraries put it


class WrongError(Exception):
    """An event that must not happen."""


@dataclass
class Run:
    """One training, from its first start to its end."""

    folder: Path
    replicas: tuple[int, ...]
    starts: int = 0
    damaged: int | None = None
    """The step whose checkpoint was damaged before this start."""

    def __str__(self) -> str:
        return f"{self.starts} starts with {' or '.join(map(str, self.replicas))} replicas"

    @property
    def gradient(self) -> str:
        """How gradients are summed: exactly where the number of replicas changes."""
        return "exact" if len(self.replicas) > 1 else "auto"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


class Job:
    """A run that was started on separate ranks."""

    def __init__(self, run: Run, grid: str, free: int, coords: Path) -> None:
        self.grid = grid
        self.ranks = int(grid[0]) * int(grid[2])
        self._mark = coords / f"status-{time.monotonic_ns()}"
        self._mark.mkdir()
        self._out = (coords / "out.txt").open("w+b")
        words = [
            str(self._mark),
            str(run.folder),
            grid,
            str(STEPS),
            run.gradient,
            str(free),
        ]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [mpirun_path(), "-n", str(self.ranks), sys.executable, "-m", "soak.soaked", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def told(self) -> list[Told]:
        return [told(self._mark, rank) for rank in range(self.ranks)]

    def kill(self, rank: int | None) -> None:
        """One rank, or all of them and the launcher."""
        ranks = self.told()
        doomed = [ranks[rank].process] if rank is not None and ranks[rank].process else []
        for process in doomed or [*(one.process for one in ranks), self.process.pid]:
            if process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def wait(self) -> int:
        """The launcher's code, once none of its ranks is left."""
        shared = set().union(*(_shared_memory(one.process) for one in self.told()))
        end = time.monotonic() + OUTLIVES_SECONDS
        code = self.process.wait(OUTLIVES_SECONDS)
        while self._left():
            if time.monotonic() > end:
                raise WrongError(f"ranks outlive the kill by {OUTLIVES_SECONDS:.0f} s")
            time.sleep(0.01)
        for path in shared:  # what killed jobs leave behind
            path.unlink(missing_ok=True)
        shutil.rmtree(self._mark)
        return code

    def said(self) -> str:
        self._out.seek(0)
        return self._out.read().decode(errors="replace")

    def _left(self) -> bool:
        """Whether a rank is still there."""
        return any(map(self._is_rank, Path("/proc").iterdir()))

    def _is_rank(self, entry: Path) -> bool:
        try:
            return str(self._mark).encode() in (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return False


def _shared_memory(process: int) -> set[Path]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        return {Path(line.split()[-1]) for line in lines if MEMORY in line}
    return set()


class Soak:
    """All cycles; what they found is in the counts."""

    def __init__(self, seed: int, coords: Path, kinds: Sequence[tuple[int, ...]] = KINDS) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # no secret
        self.coords = coords
        self.aimed: collections.Counter[str] = collections.Counter()
        self.fell: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self.passed_over = 0
        self.resumed = 0
        self._kinds = kinds
        self._runs = 0
        # How long each phase takes, as last seen: where in it a kill falls is drawn from that.
        self._seconds = {"start-up": 0.5, "resuming": 0.5, "training": 0.1, "saving": 0.05}
        self._whole: dict[tuple[int, ...], Path] = {}

    def new_run(self) -> Run:
        """A run of the next kind."""
        self._runs += 1
        replicas = self._kinds[self._runs % len(self._kinds)]
        return Run(self.coords / f"run-{self._runs}", replicas)

    def cycle(self, run: Run) -> bool:
        """Start, and kill at a random moment; whether the run came to its end before."""
        expected = self._prepare(run)
        before = _marks(run)
        grid = self.draw.choice(LAYOUTS[self.draw.choice(run.replicas)])
        moment = self.draw.choices([*MOMENTS], [*MOMENTS.values()])[0]
        job = Job(run, grid, self.draw.randrange(len(FREE)), self.coords)
        victim = self.draw.choice([None, *range(job.ranks)])
        self.aimed[moment] += 1
        self._wait_for(moment, job, run, before)
        where, fresh, ended = job.told(), _marks(run) - before, job.process.poll()
        job.kill(victim)
        code = job.wait()
        said = job.said()
        run.starts += 1
        self._check_choice(run, expected, said)
        phases = {one.phase for one in where}
        # MPICH's launcher may kill ranks that have left MPI: its code says little.
        if phases == {"ending"}:
            self.fell["after the end"] += 1
            return True
        if ended is not None and "ending" not in phases:
            raise WrongError(f"{grid} ended by itself, with code {code}:\n{said}")
        fell = "saving" if fresh else next(p for p in ("", *MOMENTS, "ending") if p in phases)
        self.fell[fell or "start-up"] += 1
        return False

    def finish(self, run: Run) -> str:
        """Compare a run that came to its end."""
        whole = self._untouched(run.replicas)
        if recorded(run.folder) != recorded(whole):
            raise WrongError(f"{run.folder} has steps {recorded(run.folder)}")
        command = [sys.executable, "-m", "axsparse", "compare", str(run.folder), str(whole)]
        compared = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
        )
        if compared.returncode != 0:
            said = compared.stdout + compared.stderr
            raise WrongError(f"{run.folder} is not the run that nobody touched, {whole}:\n{said}")
        self.finished[str(run.replicas)] += 1
        return compared.stdout.strip()

    def end(self, run: Run) -> str:
        """Let a run continue to its end, and compare it."""
        self._prepare(run)
        grid = self.draw.choice(LAYOUTS[self.draw.choice(run.replicas)])
        self._let_end(run, grid, self.draw.randrange(len(FREE)))
        return self.finish(run)

    def _let_end(self, run: Run, grid: str, free: int) -> None:
        """Start a run and leave it alone."""
        job = Job(run, grid, free, self.coords)
        job.process.wait(LIMIT_SECONDS)
        phases = {one.phase for one in job.told()}
        job.wait()
        run.starts += 1
        if phases != {"ending"}:
            raise WrongError(f"a run that nobody kills failed:\n{job.said()}")

    def _prepare(self, run: Run) -> int:
        """The step to continue from, 0 for the start; every folder with a checkpoint's name is
        complete, but for one that is damaged here at times."""
        steps = saved_steps(run.checkpoints)
        if run.damaged not in steps or is_complete(path_of(run.checkpoints, run.damaged)):
            run.damaged = None  # it is gone, or was saved once more
        for step in steps:
            if step != run.damaged and not is_complete(path_of(run.checkpoints, step)):
                raise WrongError(f"{path_of(run.checkpoints, step)} was left half done")
        whole = [step for step in steps if step != run.damaged]
        if len(whole) > 1 and self.draw.random() < 1 / DAMAGED_EVERY:
            run.damaged = whole.pop(0)
            _damage(self.draw, path_of(run.checkpoints, run.damaged))
        return whole[0] if whole else 0

    def _check_choice(self, run: Run, expected: int, said: str) -> None:
        found = CHOSEN.search(said)
        if found is None and FROM_START.search(said) is None:
            return  # killed before it chose
        chosen = 0 if found is None else int(found[1])
        if chosen != expected:
            raise WrongError(f"went on from step {chosen}, not {expected}:\n{said}")
        self.resumed += found is not None
        if run.damaged is not None and run.damaged > expected:
            if f"/step-{run.damaged}: " not in said:
                raise WrongError(f"did not name the damaged step {run.damaged}:\n{said}")
            self.passed_over += 1

    def _wait_for(self, moment: str, job: Job, run: Run, before: set[tuple[str, int]]) -> None:
        """Until a moment like this one has come, or the job ended."""
        steps = self.draw.randint(0, 12)
        first: int | None = None
        seen = {"": job.began}
        while job.process.poll() is None:
            now = time.monotonic()
            if now - job.began > LIMIT_SECONDS:
                raise WrongError(f"{job.grid} hangs:\n{job.said()}")
            there = job.told()[0]
            seen.setdefault(there.phase, now)
            if there.phase == "training":
                first = there.step if first is None else first
                self._seconds["start-up"] = seen.get("resuming", now) - job.began
                self._seconds["resuming"] = now - seen.get("resuming", now) or 0.2
            is_far = first is not None and there.step >= first + steps
            has_come = {
                "start-up": True,
                "resuming": there.phase in ("resuming", "training"),
                "training": is_far,
                "saving": is_far and bool(_marks(run) - before),
            }[moment]
            if has_come or there.phase == "ending":
                break
            time.sleep(0.001)
        end = time.monotonic() + self.draw.uniform(0, self._seconds[moment])
        while time.monotonic() < end and job.process.poll() is None:
            time.sleep(0.001)

    def _untouched(self, replicas: tuple[int, ...]) -> Path:
        """A run from start to end, trained when it is first asked for."""
        if replicas not in self._whole:
            run = Run(self.coords / f"whole-{len(self._whole)}", replicas)
            self._let_end(run, f"1x{replicas[0]}", 0)
            self._whole[replicas] = run.folder
        return self._whole[replicas]


def _marks(run: Run) -> set[tuple[str, int]]:
    """The unfinished files that are being written or removed, or were when a run was killed, each
    with its last change."""
    found = set()
    for path in unfinished(run.checkpoints):
        with contextlib.suppress(FileNotFoundError):  # it has got its name since
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _damage(draw: random.Random, checkpoint: Path) -> None:
    path = draw.choice(sorted(checkpoint.iterdir()))
    kind = draw.choice(["truncate", "flip", "remove"])
    if kind == "remove":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, draw.randrange(path.stat().st_size))
    else:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)


def recorded(run_dir: Path) -> list[int]:
    """The steps in the metrics of a run, each of which is there once."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [record["step"] for record in records if "loss" in record]
    if len(steps) != len(set(steps)):
        raise WrongError(f"{run_dir}: a step is recorded twice")
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of all that is drawn; another one each time")
    parser.add_argument("--mixed", action="store_true", help="all runs change their replicas")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    coords = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, in {coords}", flush=True)
    began, done = time.monotonic(), 0
    try:
        soak = Soak(seed, coords, (MIXED,) if arguments.mixed else KINDS)
        run = soak.new_run()
        while done < arguments.cycles and time.monotonic() - began < arguments.minutes * 60:
            done += 1
            if soak.cycle(run):
                verdict = soak.finish(run)
                print(f"cycle {done}: {run}: {verdict}")
                shutil.rmtree(run.folder)
                run = soak.new_run()
            if done % 10 == 0:
                print(f"cycle {done}: kills {dict(soak.fell)}", flush=True)
        print(f"the last one, {run}: {soak.end(run)}")
    except (WrongError, subprocess.TimeoutExpired) as wrong:
        print(f"cycle {done}, seed {seed}, {coords}: {wrong}", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - began) / 60
    print(f"{done} cycles in {minutes:.1f} min, seed {seed}")
    print(f"aimed at {dict(soak.aimed)}; kills fell on {dict(soak.fell)}")
    print(f"resumed {soak.resumed} times; damaged checkpoints passed over {soak.passed_over} times")
    print(f"runs that came to their end: {dict(soak.finished)}")
    shutil.rmtree(coords)
    return 0


if __name__ == "__main__":
    sys.exit(main())
