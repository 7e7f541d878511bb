"""What the recorder of a run starts with."""

from __future__ import annotations

import time

import pytest
import torch

from axsparse.training.run_recorder import matrix_peak


@pytest.mark.parametrize(("seconds", "products"), [(0.001, 4), (1.0, 1)])
def test_the_peak_of_slow_products_is_known_after_the_first(
    seconds: float, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 on CPUs without its instructions takes a second each."""
    spent: list[float] = []
    monkeypatch.setattr(torch, "mm", lambda *_: spent.append(seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(spent))

    assert matrix_peak(torch.float32) == pytest.approx(2 * 1024**3 / seconds)
    assert len(spent) == products
