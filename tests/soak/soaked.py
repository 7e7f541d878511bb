"""The training that is killed again and again, on one rank.

It saves every third step and resumes by itself. A file of each rank shows its position to whoever
is about to kill it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cases import merged
from support.runs import mlp, tiny_config, vector_data

from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.trainer import build

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Told:
    """Where one rank is."""

    process: int
    """0: it has not started."""
    phase: str
    """Empty, "start-up", "resuming", "training" or "ending"."""
    step: int
    """Steps done."""


def tell(status: Path, phase: str, step: int = 0) -> None:
    """As the rank that the launcher made of this process."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    said = status / f"{rank}.new"
    said.write_text(f"{os.getpid()} {phase} {step}")
    said.rename(status / rank)


def told(status: Path, rank: int) -> Told:
    """The last report of a rank."""
    try:
        process, phase, step = (status / str(rank)).read_text().split()
    except FileNotFoundError:
        return Told(0, "", 0)
    return Told(int(process), phase, int(step))


FREE: tuple[dict[str, Any], ...] = (
    {},
    {"samo": {"zero_stage": 1}},
    {"pipeline": {"split_backward": True}},
    {"pipeline": {"checkpoint_activations": 1}},
    {"samo": {"index": "mask"}, "pipeline": {"extra_in_flight": 2}},
)
"""Settings that a run may take up or drop whenever it is resumed, and that change no bit."""


def train(words: Sequence[str]) -> None:
    """STATUS RUN_DIR GRID STEPS GRADIENT SETTINGS: GRID is stages x replicas, GRADIENT the value of
    `samo.gradient`, SETTINGS a number of `FREE`."""
    status = Path(words[0])
    tell(status, "start-up")
    run(lambda job: _train(job, status, words[1:]))


def _config(run_dir: str, steps: int, gradient: str, free: Mapping[str, Any]) -> Config:
    settings = merged(
        {
            "batch": {"global_batch_size": 12, "microbatch_size": 3},
            "train": {"steps": steps, "log_every": steps},
            "checkpoint": {"every": 3, "keep_last": 2},
            "pruning": {"method": "gradual", "interval": 5, "until_step": 50},
            "samo": {"gradient": gradient},
        },
        free,
    )
    return tiny_config(run_dir=run_dir, **settings)


def _train(job: Job, status: Path, words: Sequence[str]) -> None:
    tell(status, "resuming")
    run_dir, grid, steps, gradient, free = words
    g_inter, g_data = (int(number) for number in grid.split("x"))
    config = _config(run_dir, int(steps), gradient, FREE[int(free)])

    def on_step(done: int, verdict: StepResult) -> None:
        tell(status, "training", done)

    trainer = build(
        job,
        mlp(),
        lambda: Datasets(vector_data()),
        config.with_origins("soaked", {"run_dir": "--run-dir"}),
        grid=Grid(g_inter, g_data),
        resume="auto",
    )
    tell(status, "training", trainer.steps_done)
    trainer.train(on_step)
    tell(status, "ending", trainer.steps_done)


if __name__ == "__main__":
    train(sys.argv[1:])
