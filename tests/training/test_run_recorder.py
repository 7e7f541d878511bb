"""What the recorder of a run starts with."""

from __future__ import annotations

import time

import pytest
import torch

from axsparse.training.run_recorder import matrix_peak


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
