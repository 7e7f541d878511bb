"""The paper's GPTs as formulas: flops, parameters, and the smallest pipelines that fit."""

from __future__ import annotations

import pytest
from support.planner_cases import SUMMIT, formula, schedule

from axsparse.pipeline.schedules import Schedule
from axsparse.planner.layout import Layout
from axsparse.planner.stage_memory import StageMemory
from axsparse.runtime.grid import Grid

MICROBATCHES = 512


def memory(config: str, density: float, g_inter: int, order: Schedule) -> list[StageMemory]:
    loads = formula(config, density).stages(g_inter, 1)
    assert loads is not None
    layout = Layout(Grid(g_inter, 1), order, 1, MICROBATCHES)
    return layout.memory(loads, SUMMIT.overhead_bytes)


def fullest(config: str, density: float, g_inter: int, order: Schedule) -> float:
    return max(stage.total for stage in memory(config, density, g_inter, order))


@pytest.mark.parametrize(
    ("config", "dense", "pruned"),
    [("gpt3_xl", 4, 1), ("gpt3_2.7b", 8, 2), ("gpt3_6.7b", 16, 4), ("gpt3_13b", 32, 8)],
)
def test_the_smallest_power_of_two_that_fits_summit_is_the_papers(
    config: str, dense: int, pruned: int
) -> None:
    for density, expected in ((1.0, dense), (0.1, pruned)):
        for slack in (1, expected):  # the runtime's default, and AxoNN's two pipelines' worth
            fits = [
                g_inter
                for g_inter in (1, 2, 4, 8, 16, 32)
                if fullest(config, density, g_inter, schedule(slack=slack)) <= SUMMIT.memory_bytes
            ]
            assert fits[0] == expected


def test_flops_are_narayanans_formula() -> None:
    found = formula("gpt3_2.7b")
    s, h, layers, v = 2048, 2560, 32, 50304

    expected = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert found.sample_flops == pytest.approx(expected, rel=1e-12)
    forward = sum(load.flops for load in found.stages(8, 1) or [])
    again = sum(load.again_flops for load in found.stages(8, 1) or [])
    assert 3 * forward + again == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("density", "per_parameter"), [(1.0, 20.0), (0.1, 4.4)])
def test_a_block_costs_the_papers_bytes_a_parameter(density: float, per_parameter: float) -> None:
    found, dense = formula("gpt3_2.7b", density), formula("gpt3_2.7b")
    loads = found.stages(1, 1)
    assert loads is not None
    words = 50304 * 2560
    # 20 bytes for the embedding, 6 for the gradient of its second use, copies of its half weights.
    others = 20 * found.embedding_params + 6 * words
    copies = 2 * found.embedding_params + 2 * words if density < 1 else 0

    blocks = loads[0].state.total + loads[0].temporary - others - copies

    assert blocks == pytest.approx(per_parameter * dense.body_params, rel=1e-9)
