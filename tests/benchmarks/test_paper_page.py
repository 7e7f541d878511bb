"""The figures on the page of the paper are those of committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/paper.md").read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def row(first: str, *, after: str) -> list[float]:
    """The numbers of the table row that begins with a cell, below a heading."""
    _, _, text = PAGE.partition(f"## {after}")
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    cells = [cell.strip().replace("−", "-") for cell in line.split("|")[2:-1]]
    return [float(cell) for cell in cells if re.fullmatch(r"-?[\d.]+", cell)]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w.]+)\.json`", PAGE))))
def test_results_that_are_named_are_committed(name: str) -> None:
    assert result(name)


@pytest.mark.parametrize("network", ["XL", "2.7B", "6.7B", "13B"])
def test_speedups(network: str) -> None:
    found = result("summit_replay")["speedup_percent"][f"gpt3_{network.lower()}"]

    assert row(f"GPT-3 {network}", after="Figures 5") == pytest.approx(
        list(found.values()), abs=0.051
    )


@pytest.mark.parametrize("gpus", ["256", "512", "1024", "2048"])
def test_percent_of_peak(gpus: str) -> None:
    found = result("summit_replay")["percent_of_peak"]
    shown = row(gpus, after="Table II:")
    predicted = shown[1::2] if len(shown) == 4 else shown

    expected = [found["AxoNN"][gpus], found["AxoNN+SAMO"][gpus]]
    assert predicted == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize("gpus", ["128", "256", "512"])
def test_savings_by_phase(gpus: str) -> None:
    saved = result("summit_replay")["figure8"][gpus]["saved"]

    expected = [saved[name] for name in ("p2p", "collective", "bubble", "compute")]
    assert row(gpus, after="Figure 8:") == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize(
    ("kind", "width"), [("fp32", 1024), ("fp32", 2048), ("fp32", 4096), ("bf16", 4096)]
)
def test_sparse_against_dense(kind: str, width: int) -> None:
    found = result("fig1_fc_layer_cpu")[f"forward and backward, {kind}, {width} x {width}"]
    medians = [found[name]["ratio"][1] for name in ("csr", "coo") if "ratio" in found[name]]

    shown = row(f"{kind}, {width} × {width}", after="Figure 1:")
    assert shown[1:] == pytest.approx(medians, abs=0.0051)


def test_bytes_a_parameter() -> None:
    rows = result("state_bytes")["rows"]

    assert min(each["bytes"]["0.1"] for each in rows) == pytest.approx(2.51, abs=5e-3)
    assert "2.51 at the least" in PAGE
