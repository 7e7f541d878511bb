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


def test_the_replay_has_every_cell_speedup_and_constant(replay: dict[str, Any]) -> None:
    cells, speedups = replay["percent_of_peak"], replay["speedup_percent"]

    assert list(cells) == ["AxoNN", "AxoNN+SAMO"]
    for row in cells.values():
        assert list(row) == ["256", "512", "1024", "2048"]
        assert list(row.values()) == sorted(row.values(), reverse=True)
    assert list(speedups) == ["gpt3_xl", "gpt3_2.7b", "gpt3_6.7b", "gpt3_13b"]
    for model, row in speedups.items():
        first = {"gpt3_xl": 64, "gpt3_2.7b": 64, "gpt3_6.7b": 128, "gpt3_13b": 256}[model]
        assert list(row) == [str(first * 2**n) for n in range(4)]
    assert list(replay["figure8"]) == ["128", "256", "512"]
    assert sum(entry["kind"] == "fitted" for entry in replay["constants"].values()) == 6


def test_deepspeed_3d_on_as_many_devices_as_axonn_comes_out_as_published(
    replay: dict[str, Any],
) -> None:
    for rows in replay["deepspeed_3d"].values():
        assert rows["as AxoNN"]["percent_of_peak"] == pytest.approx(rows["published"], rel=0.04)
        assert rows["bound"]["percent_of_peak"] > rows["as AxoNN"]["percent_of_peak"]


def test_the_phases_of_figure_8_are_axonns_step(replay: dict[str, Any]) -> None:
    for breakdown in replay["figure8"].values():
        assert sum(breakdown["AxoNN"].values()) == pytest.approx(100, abs=0.05)


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
