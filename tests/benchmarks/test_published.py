"""The planner and the simulator compared with published runs and tables, and their parts by
hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from published.__main__ import Check, checked_file, choices, place_of_best, scoreboard
from published.run_file import TABLES, RunRow
from published.run_step import run_costs

from axsparse.config.load import configure
from axsparse.planner.cluster import load_cluster
from axsparse.planner.plan_model import planned_model
from axsparse.planner.step_cost import stage_seconds

SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "sequence_length")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scoreboard.md"


# -- the tables -----------------------------------------------------------------------------


@cache
def table(name: str) -> Check:
    return checked_file(TABLES / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "fitted", "mean", "worst"),
    [
        ("zero-bubble-table4", 0, 0.025, 0.05),
        ("zero-bubble-table9", 0, 0.025, 0.05),
        ("zero-bubble-interleaved", 0, 0.05, 0.08),
        ("megatron-sc21", 3, 0.05, 0.10),
        ("megatron-figure14", 0, 0.06, 0.12),
        pytest.param("megatron-recomputation", 0, 0.05, 0.10, marks=pytest.mark.exhaustive),
        ("samo-summit", 0, 0.0097, 0.02),
        ("dlperf-v100-oneflow", 2, 0.085, 0.20),
        ("dlperf-v100", 2, 0.08, 0.44),
    ],
)
def test_a_bundled_table_is_predicted_within_its_target(
    name: str, fitted: int, mean: float, worst: float
) -> None:
    found = table(name)

    assert "20" in found.source
    assert sum(each.row.fit for each in found.rows) == fitted
    assert found.mean is not None and found.worst is not None
    assert found.mean <= mean
    assert found.worst <= worst
    if name.startswith("zero-bubble"):
        assert found.memory_worst is not None and found.memory_worst < 0.1


def test_the_best_published_layout_is_among_the_first_two() -> None:
    found = [
        choice
        for name in ("dlperf-v100", "megatron-figure14")
        for choice in choices(table(name).rows)
    ]

    assert len(found) == 4
    assert all(place_of_best(choice) <= 2 for choice in found)


@pytest.mark.exhaustive
def test_the_page_has_the_scoreboard_as_it_is_printed() -> None:
    found = scoreboard([checked_file(path) for path in sorted(TABLES.glob("*.yaml"))])

    assert "\n".join(found) in PAGE.read_text(encoding="utf-8")


# -- the parts, by hand ---------------------------------------------------------------------


def test_a_profile_and_the_formulas_of_published_runs_predict_alike() -> None:
    loaded = configure("gpt3_2.7b", ["model.num_layers=4"])
    machine = load_cluster("selene-a100")
    asked = planned_model(loaded, machine).profiled("dense")
    [load] = asked.stages(1, 1) or []
    sizes = loaded.model
    row = RunRow.model_validate(
        {
            "name": "run",
            "model": {field: getattr(sizes, field) for field in SIZES},
            "layout": {},
            "batch": {"global": 1, "micro": 1},
            "training": {"recompute": "full", "attention": "fused", "precision": "bf16"},
            "published": {},
        }
    )

    profiled, counted = stage_seconds(asked, load, machine, 1), run_costs(row, machine)

    assert profiled.forward == pytest.approx(counted.forward[0][0], rel=0.1)
    assert profiled.backward == pytest.approx(counted.backward[0][0], rel=0.1)
