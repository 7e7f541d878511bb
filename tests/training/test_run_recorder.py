"""The recorder of a run: what it says was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import tiny_config, tiny_gpt, token_data

from axsparse.data.dataset import Datasets
from axsparse.planner.auto_layout import Prediction
from axsparse.runtime.console import format_bytes
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.trainer import build


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
        return trainer.plan.prediction

    found, _ = world.run(planned)

    assert found is not None and found.sum_bytes > 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a tensor-parallel rank sends {format_bytes(found.sum_bytes)} a step" in said
