"""The training that is killed again and again, on one rank.

It saves every third step and resumes by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from soak.status import Status
from support.runs import mlp, tiny_config, vector_data

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.build import build

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
