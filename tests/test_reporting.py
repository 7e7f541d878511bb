"""The recorder of a run: what it says was predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import tiny_config, tiny_gpt, token_data

import axsparse.reporting
from axsparse.builder import build
from axsparse.grid import Grid
from axsparse.job import Job
from axsparse.local import LocalWorld
from axsparse.models.survey import survey
from axsparse.planner.configured import predict, workload
from axsparse.resolve import optimizer_of
from axsparse.startup import Datasets
from axsparse.transport import LocalTransport


def test_the_predicted_peak_has_10_mb_for_what_comes_with_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a process held nothing but model state.
    monkeypatch.setitem(vars(axsparse.reporting), "resident_memory_bytes", lambda: 0)
    config = tiny_config(run_dir=str(tmp_path), train={"steps": 5}, samo={"enabled": False})
    model = tiny_gpt(config)
    world: LocalWorld[None] = LocalWorld(1)
    trainer = build(
        Job(LocalTransport(world, 0)), model, lambda: Datasets(token_data(), None), config
    )
    trainer.train()
    trainer.close()

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    [told] = [
        record["predicted_peak_memory_bytes"]
        for record in map(json.loads, lines)
        if "predicted_peak_memory_bytes" in record
    ]
    subject = workload(config, survey(model), "tiny", {}, optimizer_of(config.optimizer))
    assert told == predict(subject, None, config, Grid(1, 1), 1, None).memory_bytes + 10e6
