"""The plan of a run's memory, made again from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.resuming import ran
from support.runs import mlp, tiny_config, vector_data

from axsparse.config.schema import Config
from axsparse.planner.planned_memory import PlannedMemory, planned_memory
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.checkpoint.verification import open_checkpoint
from axsparse.training.trainer import Trainer


def planned(run: Path, step: int, predicted: float) -> PlannedMemory | None:
    manifest = open_checkpoint(run / "checkpoints" / f"step-{step}").manifest
    shapes = {n: e.shape for layer in manifest.layers.values() for n, e in layer.parameters.items()}
    config = Config.model_validate(manifest.config)
    return planned_memory(config, shapes, manifest.pruned, predicted)


def prediction(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    [found] = [
        line["predicted_peak_memory_bytes"] for line in lines if "predicted_step_seconds" in line
    ]
    return float(found)


def test_the_plan_is_the_one_of_the_run_and_its_state_is_the_live_one(tmp_path: Path) -> None:
    state: dict[int, int] = {}

    def look(trainer: Trainer) -> None:
        parts = trainer.parts
        live = StateBytes.sum(layer.state.live_bytes() for layer in parts.layers)
        state[parts.place.stage] = int(live.total)

    config = tiny_config(train={"steps": 6}, pruning={"sparsity": 0.9})
    ran((2, 1), config, tmp_path / "run", look=look)
    predicted = prediction(tmp_path / "run")

    found = planned(tmp_path / "run", 6, predicted)

    assert found is not None
    assert max(stage.total for stage in found.now) == pytest.approx(predicted)
    for number, stage in enumerate(found.now):
        parts = (stage.weight, stage.index, stage.gradient, stage.master, stage.optimizer)
        assert sum(parts) == state[number]
        assert stage.optimizer < found.dense[number].optimizer
        assert stage.overhead == found.dense[number].overhead > 0


def test_a_run_that_is_pruned_later_was_planned_dense(tmp_path: Path) -> None:
    config = tiny_config(train={"steps": 6}, pruning={"sparsity": 0.9, "at_step": 3})
    ran((1, 1), config, tmp_path / "run")
    predicted = prediction(tmp_path / "run")

    found = planned(tmp_path / "run", 6, predicted)

    assert found is not None
    assert max(stage.total for stage in found.dense) == pytest.approx(predicted)
    assert found.now[0].total < found.dense[0].total


def test_of_a_model_of_ones_own_nothing_is_known(tmp_path: Path) -> None:
    config = tiny_config(train={"steps": 1})
    ran((1, 1), config, tmp_path / "run", model=lambda _: mlp(), data=vector_data())

    assert planned(tmp_path / "run", 1, 1e9) is None
