"""The error when the memory of a GPU or of the machine runs out."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.runs import job_alone, tiny_config, tiny_gpt, token_data

import axsparse.training.build
from axsparse.data.dataset import Datasets
from axsparse.observe.out_of_memory import with_advice
from axsparse.runtime.errors import TrainingError
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.trainer import build

STATE = StateBytes(weight=26_000_000_000, gradient=2_600_000_000, optimizer=10_400_000_000)
TORCH = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB"


@pytest.fixture(autouse=True)
def _a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 70_000_000_000)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            torch.OutOfMemoryError(TORCH),
            "GPU memory ran out in B3 of step 12: 70.0 GB held, 39.0 GB of it model state, "
            "predicted peak 62.0 GB; ",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 4202692608 bytes. Error code 12"
            ),
            "memory ran out in B3 of step 12: 4.2 GB more were wanted; ",
        ),
        (MemoryError(), "memory ran out in B3 of step 12; "),
    ],
)
def test_one_line_says_what_fills_the_memory_and_what_makes_room(
    raised: Exception, said: str
) -> None:
    with (
        pytest.raises(TrainingError) as caught,
        with_advice(lambda: "B3 of step 12", lambda: STATE, 62e9),
    ):
        raise raised
    assert caught.value.__cause__ is raised and not caught.value.on_all_ranks
    assert str(caught.value) == said + (
        "raise layout.g_inter, lower batch.microbatch_size, or set pipeline.checkpoint_activations"
    )


def full(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError(TORCH)


@pytest.mark.parametrize("where", ["building rank 0 (stage 0, replica 0)", "training of step 1"])
def test_state_and_steps_that_do_not_fit_say_so_and_what_was_predicted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(run_dir=str(tmp_path / "run"), train={"steps": 2})
    if where.startswith("building"):
        monkeypatch.setattr(axsparse.training.build, "build_layers", full)

    def train() -> None:
        trainer = build(job_alone(), tiny_gpt(config), lambda: Datasets(token_data()), config)
        monkeypatch.setattr(trainer._step, "train_step", full)
        trainer.train()

    with pytest.raises(TrainingError) as caught:
        train()
    assert str(caught.value).startswith(f"GPU memory ran out in {where}: 70.0 GB")
    assert "predicted peak" in str(caught.value)


def test_other_failures_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="another"), with_advice(str, lambda: STATE, None):
        raise RuntimeError("another")
