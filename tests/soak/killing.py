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
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support.mpirun import ENVIRONMENT, mpirun_path, ranks_of, shared_memory
from support.resuming import records_of

from axsparse.training.checkpoint.checkpoint_folder import (
    CHECKPOINTS,
    path_of,
    saved_steps,
    unfinished,
)
from axsparse.training.checkpoint.verification import is_complete

STEPS = 60
CONFIG = f"""\
model: {{num_layers: 2, hidden_size: 16, num_heads: 2, sequence_length: 8}}
batch: {{global_batch_size: 12, microbatch_size: 3}}
train: {{steps: {STEPS}, log_every: {STEPS}, eval_every: 0, eval_steps: 0, peak_flops: 1.0e+9}}
precision: fp32
checkpoint: {{every: 3, keep_last: 2}}
pruning: {{method: gradual, interval: 5, until_step: 50}}
"""
STAGES = {1: (1, 2, 2, 3, 4), 2: (1, 1, 2), 3: (1,), 4: (1,)}
"""By number of replicas; fewer ranks start sooner."""
MIXED = (1, 2, 3, 4)
KINDS = ((1,), (2,), MIXED)
"""The numbers of replicas of runs: two of three keep theirs."""
FREE = (
    (),
    ("samo.zero_stage=1",),
    ("pipeline.split_backward=true",),
    ("pipeline.checkpoint_activations=1",),
    ("samo.index=mask", "pipeline.extra_in_flight=2"),
)
"""Settings that a run may take up or drop whenever it is resumed, and that change no bit."""
MOMENTS = {"starting": 3, "training": 4, "saving": 4}
"""How often each is aimed at."""
DAMAGED_EVERY = 8
"""On average, a cycle begins with a damaged checkpoint."""
OUTLIVES_SECONDS = 60.0
LIMIT_SECONDS = 300.0
CHOSEN = re.compile(
    r"^axsparse: (?:goes on from .*/step-(\d+), |.*starts from the beginning$)", re.M
)


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

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.exists() else 0


class Soak:
    """All cycles; what they found is in the counts."""

    def __init__(self, seed: int, folder: Path, kinds: tuple[tuple[int, ...], ...]) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # no secret
        self.folder = folder
        self.aimed: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self.resumed = self.passed_over = 0
        self._kinds = kinds
        self._runs = 0
        self._starting_seconds = 5.0
        """How long the last start took."""
        self._whole: dict[tuple[int, ...], Path] = {}
        (folder / "soak.yaml").write_text(CONFIG)

    def new_run(self) -> Run:
        """A run of the next kind."""
        self._runs += 1
        replicas = self._kinds[self._runs % len(self._kinds)]
        return Run(self.folder / f"run-{self._runs}", replicas)

    def cycle(self, run: Run) -> bool:
        """Start, and kill at a random moment; whether the run came to its end before."""
        expected = self._prepare(run)
        [moment] = self.draw.choices([*MOMENTS], [*MOMENTS.values()])
        self.aimed[moment] += 1
        with (self.folder / "out.txt").open("w+") as out:
            job = self._start(run, out.fileno())
            self._wait_for(moment, job, run)
            ended = job.poll()
            self._kill(run, job)
            out.seek(0)
            said = out.read()
        self._check_choice(run, expected, said)
        if ended:
            raise WrongError(f"ended by itself, with code {ended}:\n{said}")
        return ended == 0

    def end(self, run: Run) -> str:
        """Let a run continue to its end, and compare it with one that nobody touched."""
        self._let_end(run)
        if run.replicas not in self._whole:
            whole = Run(self.folder / f"whole-{len(self._whole)}", run.replicas)
            self._let_end(whole)
            self._whole[run.replicas] = whole.folder
        if [record["step"] for record in records_of(run.folder, "loss")] != [*range(1, STEPS + 1)]:
            raise WrongError(f"{run.folder}: not every step is recorded once")
        words = ["compare", str(run.folder), str(self._whole[run.replicas])]
        compared = subprocess.run(
            [sys.executable, "-m", "axsparse", *words], capture_output=True, text=True, check=False
        )
        said = compared.stdout + compared.stderr
        if compared.returncode != 0:
            raise WrongError(f"{run.folder} is not the run that nobody touched:\n{said}")
        self.finished[str(run.replicas)] += 1
        return f"{run.starts} starts with {run.replicas} replicas: {said.strip()}"

    def _start(self, run: Run, out: int) -> subprocess.Popen[bytes]:
        run.starts += 1
        replicas = self.draw.choice(run.replicas)
        stages = self.draw.choice(STAGES[replicas])
        settings = [f"layout.g_inter={stages}", *self.draw.choice(FREE)]
        settings += ["samo.gradient=exact"] if len(run.replicas) > 1 else []
        words = ["-m", "axsparse.train", "--config", "soak.yaml", "--run-dir", str(run.folder)]
        words += [word for setting in settings for word in ("--set", setting)]
        words += ["--resume", "auto"]
        return subprocess.Popen(
            [mpirun_path(), "-n", str(stages * replicas), sys.executable, *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def _let_end(self, run: Run) -> None:
        with (self.folder / "out.txt").open("w+") as out:
            if self._start(run, out.fileno()).wait(LIMIT_SECONDS) != 0:
                out.seek(0)
                raise WrongError(f"a run that nobody kills failed:\n{out.read()}")

    def _prepare(self, run: Run) -> int:
        """The step to continue from, 0 for the start; every folder with a checkpoint's name is
        complete, but for one that is damaged here at times."""
        steps = saved_steps(run.checkpoints)
        if run.damaged not in steps or is_complete(path_of(run.checkpoints, run.damaged)):
            run.damaged = None  # it is gone, or was saved once more
        whole = [step for step in steps if step != run.damaged]
        for step in whole:
            path = path_of(run.checkpoints, step)
            # A rank that outlives its launcher for a moment may be removing an outdated one.
            if not is_complete(path) and path.exists():
                raise WrongError(f"{path} was left half done")
        if len(whole) > 1 and self.draw.random() < 1 / DAMAGED_EVERY:
            run.damaged = whole.pop(0)
            file = self.draw.choice(sorted(path_of(run.checkpoints, run.damaged).iterdir()))
            os.truncate(file, self.draw.randrange(file.stat().st_size))
        return whole[0] if whole else 0

    def _check_choice(self, run: Run, expected: int, said: str) -> None:
        found = CHOSEN.search(said)
        if found is None:
            return  # killed before it chose
        if int(found[1] or 0) != expected:
            raise WrongError(f"went on from step {found[1]}, not {expected}:\n{said}")
        self.resumed += expected > 0
        if run.damaged is not None and run.damaged > expected:
            if f"/step-{run.damaged}: " not in said:
                raise WrongError(f"did not name the damaged step {run.damaged}:\n{said}")
            self.passed_over += 1

    def _wait_for(self, moment: str, job: subprocess.Popen[bytes], run: Run) -> None:
        """Until a moment like this one has come, or the job has ended."""
        began, before, left = time.monotonic(), run.steps(), set(unfinished(run.checkpoints))
        steps = before + self.draw.randint(1, 12)
        while job.poll() is None and moment != "starting":
            if time.monotonic() - began > LIMIT_SECONDS:
                raise WrongError(f"{run.folder} hangs")
            is_saving = bool({*unfinished(run.checkpoints)} - left)
            if run.steps() >= steps and (is_saving or moment == "training"):
                break
            time.sleep(0.005)
        if moment == "starting":
            time.sleep(self.draw.uniform(0, 1.2 * self._starting_seconds))
        else:
            self._starting_seconds = time.monotonic() - began

    def _kill(self, run: Run, job: subprocess.Popen[bytes]) -> None:
        """One rank, or all of them and the launcher; returns when none is left."""
        ranks = [*ranks_of(run.folder)]
        shared = set[Path]().union(*map(shared_memory, ranks))
        one = ranks and self.draw.random() < 0.7
        for process in [self.draw.choice(ranks)] if one else [*ranks, job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        until = time.monotonic() + OUTLIVES_SECONDS
        job.wait(OUTLIVES_SECONDS)
        while any(ranks_of(run.folder)):
            if time.monotonic() > until:
                raise WrongError(f"ranks outlive the kill by {OUTLIVES_SECONDS:.0f} s")
            time.sleep(0.01)
        for path in shared:  # what killed jobs leave behind
            path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of all that is drawn; another one each time")
    parser.add_argument("--mixed", action="store_true", help="all runs change their replicas")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, in {folder}", flush=True)
    began, done = time.monotonic(), 0
    try:
        soak = Soak(seed, folder, (MIXED,) if arguments.mixed else KINDS)
        run = soak.new_run()
        for done in range(1, arguments.cycles + 1):
            if soak.cycle(run) and done < arguments.cycles:
                print(f"cycle {done}: {soak.end(run)}", flush=True)
                shutil.rmtree(run.folder)
                run = soak.new_run()
        print(f"the last one: {soak.end(run)}")
    except (WrongError, subprocess.TimeoutExpired) as wrong:
        print(f"cycle {done}, seed {seed}, {folder}: {wrong}", file=sys.stderr)
        return 1
    print(f"{done} cycles in {(time.monotonic() - began) / 60:.1f} min, seed {seed}")
    print(f"kills were aimed at {dict(soak.aimed)}; runs that ended: {dict(soak.finished)}")
    print(f"resumed {soak.resumed} times; damaged checkpoints passed over {soak.passed_over} times")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
