"""The recorder of a run: what it says was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.late_device import LateDevice
from support.resuming import records_of
from support.runs import tiny_config, tiny_gpt, token_data

import axsparse.training.run_recorder
from axsparse.data.dataset import Datasets
from axsparse.models.model_profile import profile
from axsparse.observe.phases import DevicePhases
from axsparse.planner.auto_layout import Prediction, predict
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.runtime.console import format_bytes
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.backend import HOST
from axsparse.samo.optim.optimizer import optimizer_of
from axsparse.training import plan
from axsparse.training.placement import Placement
from axsparse.training.plan import HOLES
from axsparse.training.trainer import build


def test_the_predicted_peak_has_10_mb_for_what_comes_with_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a process held nothing but model state.
    monkeypatch.setitem(vars(axsparse.training.run_recorder), "resident_memory_bytes", lambda: 0)
    config = tiny_config(run_dir=str(tmp_path), train={"steps": 5}, samo={"enabled": False})
    model = tiny_gpt(config)
    world: LocalWorld[None] = LocalWorld(1)
    trainer = build(
        Job(LocalTransport(world, 0)), model, lambda: Datasets(token_data(), None), config
    )
    trainer.train()
    trainer.close()

    key = "predicted_peak_memory_bytes"
    [record] = records_of(tmp_path, key)
    subject = ProfiledModel(config, profile(model), "tiny", {}, optimizer_of(config.optimizer))
    assert record[key] == predict(subject, None, config, Grid(1, 1), 1, None).memory_bytes + 10e6


def test_on_a_gpu_the_plan_is_the_gpus_and_the_table_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        vars(axsparse.training.run_recorder), "resident_memory_bytes", lambda: 10**10
    )
    monkeypatch.setitem(vars(plan), "resident_memory_bytes", lambda: 10**8)
    config = tiny_config(
        run_dir=str(tmp_path),
        samo={"enabled": False},
        layout={"g_inter": 1, "memory_per_rank": 0.4006},  # on a host that would be tight
    )
    model = tiny_gpt(config)
    job = Job(LocalTransport(LocalWorld(1), 0))
    job.placement = Placement(job.transport, HOST, LateDevice(), ["host n0: rank 0 → GPU 0 (H200)"])
    trainer = build(job, model, lambda: Datasets(token_data(), None), config)

    subject = ProfiledModel(
        config, profile(model), "tiny", {}, optimizer_of(config.optimizer), on_host=False
    )
    planned = predict(subject, None, config, Grid(1, 1), 1, None).memory_bytes
    assert trainer.parts.recorder.predicted_memory_bytes == planned
    assert isinstance(trainer.parts.phases, DevicePhases)
    assert planned * (1 + HOLES) > 6e5 > planned
    said = capsys.readouterr().out
    assert said.startswith("host n0: rank 0 → GPU 0 (H200)\n") and "tight" not in said
    trainer.close()


def test_the_banner_says_what_members_take_and_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        run_dir=str(tmp_path), layout={"g_inter": 1, "g_tensor": 2, "memory_per_rank": 16.0}
    )
    world: LocalWorld[Prediction | None] = LocalWorld(2)

    def planned(rank: int) -> Prediction | None:
        job = Job(LocalTransport(world, rank))
        trainer = build(job, tiny_gpt(config), lambda: Datasets(token_data(), None), config)
        trainer.close()
        return trainer.parts.plan.prediction

    found, _ = world.run(planned)

    assert found is not None and found.sum_bytes > 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a tensor-parallel rank sends {format_bytes(found.sum_bytes)} a step" in said
