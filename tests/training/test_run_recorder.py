"""What the recorder of a run starts with."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import axsparse as ax
from axsparse.training.run_recorder import matrix_peak


def test_targets_of_a_data_set_of_torch_are_the_tokens_of_a_step(tmp_path: Path) -> None:
    """Also where some of them might not count, so that they are counted in each microbatch."""
    pairs = [(torch.ones(2), torch.tensor([1, 2, 0])) for _ in range(8)]
    trainer = ax.Trainer(
        nn.Sequential(nn.Linear(2, 3)),
        ax.from_torch(pairs),
        loss=lambda output, _: output.float().sum(),
        config={"samo.enabled": False, "batch.global_batch_size": 4, "train.eval_steps": 0},
        steps=1,
        run_dir=str(tmp_path / "run"),
    )

    trainer.train()

    [record] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(record)["tokens"] == 12


@pytest.mark.parametrize(
    ("seconds", "peak_of"),
    [([0.4, 0.001], 0.001), ([0.002, 0.001, 0.001, 0.001], 0.001), ([1.0, 0.9], 0.9)],
)
def test_the_peak_is_that_of_two_slow_products_or_of_four(
    seconds: list[float], peak_of: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may load libraries; those of bf16 without its instructions take a second."""
    spent: list[float] = []
    monkeypatch.setattr(torch, "mm", lambda *_: spent.append(seconds[len(spent)]))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(spent))

    assert matrix_peak(torch.float32) == pytest.approx(2 * 1024**3 / peak_of)
    assert spent == seconds
