"""Steps that update nothing, and where they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.exhaustive import by_default
from support.resuming import ran
from support.runs import FEW_MICROBATCHES, around_step, tiny_config

from axsparse.runtime.errors import TrainingError
from axsparse.training.trainer import Trainer

STEPS = 14


def ruined_after(step: int) -> Callable[[Trainer], None]:
    """The update of this step leaves a weight that is no number, as one of too large a rate may."""

    def ruin(trainer: Trainer, _: object) -> None:
        if trainer.steps_done == step:
            layer = trainer.layers[-1].state
            layer.optimizer_state.write_master(layer.owned[0], 0, torch.full((1,), math.inf))

    return around_step(after=ruin)


@pytest.mark.parametrize("every", by_default([1], [1, 2]))
def test_steps_that_are_skipped_leave_a_checkpoint_from_before_which_the_error_names(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.training.step.PATIENCE", 5)
    config = tiny_config(
        train={"steps": STEPS, "log_every": 1},
        batch=FEW_MICROBATCHES,
        checkpoint={"every": every, "keep_last": 1},
    )
    with pytest.raises(TrainingError) as first:
        ran((2, 1), config, tmp_path / "run", look=ruined_after(4))
    with pytest.raises(TrainingError) as again:
        ran((2, 1), config, tmp_path / "run", resume="auto")

    good = 3 if every == 1 else 2
    there = f"{tmp_path}/run/checkpoints/step-{good}"
    assert str(again.value).endswith(
        f"or look at the data; weights were good up to step {good}: go on from there by --resume "
        f"{there} (in Python resume=) in another --run-dir (in Python run_dir=)"
    )
    assert str(first.value).startswith("step 5: ")
    again_from = ran((1, 1), config, tmp_path / "another", resume=there)
    assert list(again_from.losses) == list(range(good + 1, STEPS + 1))
