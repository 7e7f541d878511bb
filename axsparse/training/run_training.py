"""A run from its first step to its last, which may change to another layout once it is pruned."""

from __future__ import annotations

from collections.abc import Callable

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.models.layer import Model
from axsparse.pruning.criteria import Score
from axsparse.runtime.job import Job
from axsparse.training.build import build
from axsparse.training.callbacks import OnCheckpoint, OnEvaluation, OnStep


# Reason: these are the arguments of the Python API, all but the first four optional.
def run_training(
    job: Job,
    model: Model,
    open_datasets: Callable[[], Datasets],
    config: Config | LoadedConfig,
    *,
    score: Score | None = None,
    resume: str | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
) -> None:
    """Build a trainer and train; all ranks call this together with equal arguments.

    With `layout.g_inter_pruned`, training ends a first time where the last masks are drawn,
    saves, and lets go of all state; what was saved goes on at once on the same ranks, in the
    layout that fits what is kept. The arguments and errors are those of `build` and
    `Trainer.train`.
    """
    while True:
        trainer = build(job, model, open_datasets, config, score=score, resume=resume)
        trainer.train(on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)
        if not trainer.hands_over:
            return
        resume = str(job.run_dir)
        del trainer  # the next one needs its memory
