"""The training that is killed again and again, on one rank.

It saves every third step and resumes by itself. By a file that all ranks map it tells whoever is
about to kill it where it is.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.runs import mlp, tiny_config, vector_data

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.build import build

_ENTRY = struct.Struct("=qqq")
PHASES = ("", "start-up", "resuming", "training", "ending")
MAX_RANKS = 8
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Told:
    """Where one rank is."""

    process: int
    """0: it has not started."""
    phase: str
    step: int
    """Steps done."""


class Status:
    """The entries of all ranks; each writes its own."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), MAX_RANKS * _ENTRY.size)

    @classmethod
    def new(cls, path: Path) -> Status:
        """An empty one."""
        path.write_bytes(bytes(MAX_RANKS * _ENTRY.size))
        return cls(path)

    def tell(self, phase: str, step: int = 0) -> None:
        """As the rank that the launcher made of this process."""
        rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
        entry = (os.getpid(), PHASES.index(phase), step)
        _ENTRY.pack_into(self._map, rank * _ENTRY.size, *entry)

    def read(self, rank: int) -> Told:
        """What a rank said last."""
        process, phase, step = _ENTRY.unpack_from(self._map, rank * _ENTRY.size)
        return Told(process, PHASES[phase], step)


METHODS = {
    # Its masks change with the weights, so that other sums over replicas may lead elsewhere.
    "gradual": {"method": "gradual", "interval": 5, "until_step": 50},
    "random": {"method": "random"},
}


def train(words: Sequence[str]) -> None:
    """STATUS RUN_DIR GRID STEPS METHOD: GRID is stages x replicas, METHOD one of `METHODS`."""
    status = Status(Path(words[0]))
    status.tell("start-up")
    run(lambda job: _train(job, status, words[1:]))


def _config(run_dir: Path, steps: int, method: str, g_data: int) -> Config:
    return tiny_config(
        run_dir=str(run_dir),
        batch={"global_batch_size": 12, "microbatch_size": 3},
        train={"steps": steps, "log_every": steps},
        checkpoint={"every": 3, "keep_last": 2},
        pruning=METHODS[method],
        samo={"shard_optimizer": g_data > 1},
    )


def _train(job: Job, status: Status, words: Sequence[str]) -> None:
    status.tell("resuming")
    run_dir, grid, steps, method = words
    g_inter, g_data = (int(number) for number in grid.split("x"))
    config = _config(Path(run_dir), int(steps), method, g_data)

    def on_step(done: int, verdict: Verdict) -> None:
        status.tell("training", done)

    trainer = build(
        job,
        mlp(),
        lambda: Datasets(vector_data()),
        LoadedConfig(config, "soaked", {"run_dir": "--run-dir"}),
        grid=Grid(g_inter, g_data),
        resume="auto",
    )
    status.tell("training", trainer.steps_done)
    trainer.train(on_step)
    status.tell("ending", trainer.steps_done)


if __name__ == "__main__":
    train(sys.argv[1:])
