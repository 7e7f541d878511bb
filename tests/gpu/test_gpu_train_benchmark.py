"""What `benchmarks/gpu_train.py` does before it has a GPU: plans, turns and failures, on a CPU."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.mpirun import TESTS

BENCHMARKS = TESTS.parent / "benchmarks"
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"),
    *("model.sequence_length=16", "batch.microbatch_size=2", "batch.global_batch_size=4"),
)
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="benchmarks/ is not here")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gpu_train")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def tiny(benchmark: ModuleType, steps: int = 4) -> Any:
    return benchmark.Training("quickstart.yaml", TINY, steps)


def place(benchmark: ModuleType, folder: Path, seconds: float = 120.0) -> Any:
    device = benchmark.Device("none", 24_000_000_000, 1.0)
    return benchmark.Place(device, folder, time.monotonic() + seconds)


def outcomes(rows: list[Any]) -> dict[str, str]:
    return {row.check: row.outcome for row in rows}


@pytest.mark.exhaustive
def test_a_training_is_held_against_its_plan(benchmark: ModuleType, tmp_path: Path) -> None:
    here = place(benchmark, tmp_path)

    rows, detail = benchmark.alone("tiny", benchmark.pruned(tiny(benchmark), here), here)

    assert outcomes(rows) == {
        "seconds a step": "info",
        "tokens a second": "info",
        benchmark.PART_OF_PEAK: "pass",
        "every loss is a number": "pass",
        "live state has the planned bytes": "pass",
    }
    assert len(detail["step seconds"]) == 4
    assert detail["tokens a step"] == 4 * 16
    assert set(detail["phases, medians"]) >= {"compute_seconds", "optimizer_seconds"}


def test_without_a_gpu_it_ends_with_69(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert benchmark.main(["2.7b"]) == 69
    assert "no CUDA device is here" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main(["3b"])
    assert "3b: no run; choose of 2.7b, 2.7b-4" in capsys.readouterr().err
