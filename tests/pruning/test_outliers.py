"""Sparsities of layers by their shares of outliers."""

from __future__ import annotations

import pytest

from axsparse.pruning.outliers import sparsities

ENTRIES = {"a": 100, "b": 300, "c": 100}


@pytest.mark.parametrize(
    ("mean", "spread"),
    [(0.7, 0.16), (0.9, 0.1), (0.99, 0.01), (0.1, 0.1)],
    ids=["paper", "90", "99", "10"],
)
def test_the_mean_stays_and_every_layer_keeps_something(mean: float, spread: float) -> None:
    found = sparsities({"a": 0.02, "b": 0.01, "c": 0.03}, ENTRIES, mean)

    assert sum(found[name] * ENTRIES[name] for name in ENTRIES) / 500 == pytest.approx(mean)
    assert found["b"] - found["c"] == pytest.approx(spread)
    assert found["a"] == pytest.approx((found["b"] + found["c"]) / 2)
    assert all(0 < value < 1 for value in found.values())


def test_alike_layers_have_one_sparsity() -> None:
    assert sparsities({"a": 0.02, "b": 0.02}, ENTRIES, 0.8) == {"a": 0.8, "b": 0.8}
