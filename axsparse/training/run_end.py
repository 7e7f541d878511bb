"""What a run says at its end, and when its result cannot be used."""

from __future__ import annotations

import math
from collections.abc import Iterator

from axsparse.pruning.methods.masking import Masking
from axsparse.runtime.errors import TrainingError, everywhere
from axsparse.training.checkpoint.checkpoint_folder import path_of
from axsparse.training.checkpoint.manifest import Progress
from axsparse.training.checkpoint.saver import Saver
from axsparse.training.evaluation import Evaluation


def refuse_bad_end(steps_done: int, last: Evaluation | None, masking: Masking | None) -> None:
    """TrainingError on all ranks if the result of the training cannot be used."""
    if last is not None and not math.isfinite(last.loss):
        raise everywhere(
            TrainingError(
                f"step {steps_done}: the validation loss is {last.loss}; lower "
                "optimizer.learning_rate, or look at the data"
            )
        )
    if masking is not None and masking.unfinished is not None:
        raise everywhere(TrainingError(f"step {steps_done}: {masking.unfinished}"))


def last_lines(progress: Progress, skipped: list[str], saver: Saver | None) -> Iterator[str]:
    """How many steps were skipped, if any were, and where the result is."""
    if skipped:
        yield f"of {progress.step} steps: {', '.join(skipped)}"
    if saver is None:
        return
    run = saver.folder.parent
    if progress.best is not None:
        yield (
            f"lowest validation loss {progress.best.loss:.4f} after step {progress.best.step}, "
            f"kept in {path_of(saver.folder, progress.best.step)}"
        )
    if saver.last_step == progress.step:
        yield (
            f"saved in {saver.folder}  ·  axsparse report {run} draws it  ·  axsparse export "
            f"{run} --to torch --out weights.safetensors takes the weights out"
        )
