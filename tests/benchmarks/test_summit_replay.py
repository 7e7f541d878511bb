"""The replay of the study keeps its targets, with constants that the fit finds again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from summit_replay import results

from axsparse.planner.cluster import load_cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TARGETS = {"percent of peak": 2.5, "speedup": 3.5, "figure 8": 3.0}


@pytest.fixture(scope="module")
def replay() -> dict[str, Any]:
    return results(load_cluster("summit"))


def test_the_published_figures_come_out_within_their_targets(replay: dict[str, Any]) -> None:
    assert replay["mean_misfit"].keys() == TARGETS.keys()
    for group, target in TARGETS.items():
        assert replay["mean_misfit"][group] <= target


def test_the_bundled_constants_are_those_of_the_recorded_fit() -> None:
    recorded = json.loads((BENCHMARKS / "results" / "summit_replay.json").read_text())
    summit = load_cluster("summit")

    fitted = recorded["fits"]["simulated, all figures"]["constants"]

    assert len(fitted) <= 6
    for name, value in fitted.items():
        assert getattr(summit, name) == pytest.approx(value, rel=2e-3)


def test_the_simulation_predicts_what_it_was_not_fitted_to_better_than_the_baselines() -> None:
    recorded = json.loads((BENCHMARKS / "results" / "summit_replay.json").read_text())
    fits = recorded["fits"]

    def worst(name: str) -> float:
        misfit: list[float] = fits[f"{name}, without 512 cells"]["cells_of_512"]
        return max(map(abs, misfit))

    assert worst("simulated") < 1.5
    assert worst("simulated") < worst("closed form")
    assert worst("simulated") < min(recorded["one_point_misfit_of_512"].values())
