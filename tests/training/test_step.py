"""Steps that update nothing: runs whose losses jump, and where they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.exhaustive import by_default
from support.resuming import Layout, Ran, ran, records_of, same_state
from support.runs import FEW_MICROBATCHES, mlp, tiny_config, vector_data
from torch import Tensor

from axsparse.cli import checkpoint
from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.data.order import samples_of_step
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Model
from axsparse.runtime.errors import TrainingError
from axsparse.training.checkpoint.checkpoint_folder import read_manifest
from axsparse.training.trainer import Trainer

STEPS, EVERY, SPIKE = 14, 4, 6
"""Steps of a run and between its checkpoints, and the batch that spikes."""
HEAVY = 100
"""Added to the class of a sample, which then counts 51 times."""
SAMPLES, BATCH = 300, 12


def weighted_loss(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets % HEAVY, reduction="none")
    return (losses * (1 + 50 * (targets // HEAVY))).sum()


def model() -> Model:
    layers = mlp()
    return Model(layers.layers, loss=weighted_loss, name="mlp")


def data(*spikes: int) -> ArrayDataset:
    """Points and classes, with a sample in each of these batches that makes the loss jump."""
    (inputs,), targets = vector_data(SAMPLES).read(np.arange(SAMPLES))
    assert targets is not None
    targets = targets.clone()
    for batch in spikes:
        targets[int(samples_of_step(SAMPLES, BATCH, batch, 11)[0])] += HEAVY
    return ArrayDataset(inputs, targets)


def config_of(rule: str = "skip", **sections: Any) -> Config:
    return tiny_config(
        spikes={"rule": rule, "window": 3, **sections.pop("spikes", {})},
        **{
            "train": {"steps": STEPS, "log_every": 1},
            "batch": FEW_MICROBATCHES,
            "checkpoint": {"every": EVERY, "keep_last": 1},
            **sections,
        },
    )


def run_here(
    config: Config, run_dir: Path, *spikes: int, layout: Layout = (1, 1), **how: Any
) -> Ran:
    """A run in this process whose data have a spike in each of these batches."""
    return ran(layout, config, run_dir, model=lambda _: model(), data=data(*spikes), **how)


def test_a_spike_is_skipped_by_all_ranks_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = run_here(config_of("none"), tmp_path / "blind", SPIKE)

    ours = run_here(config_of("skip"), tmp_path / "run", SPIKE, layout=(2, 2))

    steps = records_of(tmp_path / "run", "loss")
    bad = SPIKE + 1
    assert [record["step"] for record in steps if record["skipped"]] == [bad]
    assert [record["skipped_steps"] for record in steps] == [0] * SPIKE + [1] * (STEPS - SPIKE)
    assert steps[SPIKE]["skip_reason"].startswith(f"spike: the loss is {ours.losses[bad]:.4g}, the")
    assert ours.losses[bad] == pytest.approx(blind.losses[bad], rel=1e-5)
    assert ours.losses[bad + 1] != pytest.approx(blind.losses[bad + 1], rel=1e-5)
    assert ours.progress is not None
    assert (ours.progress.spiked, ours.progress.updates) == (1, STEPS - 1)
    assert ours.progress.good_steps == STEPS - 1
    shown = capsys.readouterr().out.splitlines()
    assert any(f"step {bad}: spike: the loss is" in line for line in shown)
    assert shown[-2] == f"of {STEPS} steps: 1 skipped for a spike of the loss"
    assert shown[-1].startswith("saved in ")


def test_stopped_and_resumed_it_is_the_uninterrupted_run(tmp_path: Path) -> None:
    config, layout, run = config_of(), (2, 2), tmp_path / "run"
    whole = run_here(config, tmp_path / "whole", SPIKE, layout=layout)

    first = run_here(config, run, SPIKE, layout=layout, stop_after=SPIKE)
    second = run_here(config, run, SPIKE, layout=layout, resume="auto")

    assert first.stopped is not None
    assert {**first.losses, **second.losses} == whole.losses
    assert second.progress == whole.progress
    same_state(second, whole)
    for name in ("loss", "skip_reason", "skipped_steps"):
        expected = [record[name] for record in records_of(tmp_path / "whole", "loss")]
        assert [record[name] for record in records_of(run, "loss")] == expected


def test_the_usual_loss_begins_anew_with_new_masks(tmp_path: Path) -> None:
    pruned = {"method": "magnitude", "at_step": SPIKE}

    run_here(
        config_of("skip", pruning=pruned, checkpoint={"every": SPIKE + 1, "keep_last": 3}), tmp_path
    )

    saved = read_manifest(tmp_path / "checkpoints" / f"step-{SPIKE + 1}").progress
    assert saved.masks_changed == SPIKE
    assert saved.spikes.losses == [records_of(tmp_path, "loss")[SPIKE]["loss"]]


# -- where it ends --------------------------------------------------------------------------


def ruined_after(step: int) -> Callable[[Trainer], None]:
    """The update of this step leaves a weight that is no number, as one of too large a rate may."""

    def look(trainer: Trainer) -> None:
        clean = trainer.step

        def stepping() -> StepResult:
            verdict = clean()
            if trainer.steps_done == step:
                layer = trainer.layers[-1].state
                tensor = layer.owned[0]
                layer.optimizer_state.write_master(tensor, 0, torch.full((1,), math.inf))
            return verdict

        vars(trainer)["step"] = stepping

    return look


@pytest.mark.parametrize("every", by_default([1], [1, 2]))
def test_steps_that_are_skipped_leave_a_checkpoint_from_before_which_the_error_names(
    every: int, tmp_path: Path
) -> None:
    config = config_of(checkpoint={"every": every, "keep_last": 1}, loss_scale={"patience": 5})
    with pytest.raises(TrainingError) as first:
        run_here(config, tmp_path, layout=(2, 1), look=ruined_after(4))
    with pytest.raises(TrainingError) as again:
        run_here(config, tmp_path, layout=(2, 1), resume="auto")

    good = 3 if every == 1 else 2
    assert str(again.value).endswith(
        f"or look at the data; weights were good up to step {good}: axsparse checkpoint prune "
        f"{tmp_path} --after {good}, then --resume auto"
    )
    assert str(first.value).startswith("step 5: ")
    asked = checkpoint.parser().parse_args(["prune", str(tmp_path), "--after", str(good)])
    asked.work(asked)
    assert list(run_here(config, tmp_path, resume="auto").losses) == list(
        range(good + 1, STEPS + 1)
    )
