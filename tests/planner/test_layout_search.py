"""Plans: what is recommended, what is rejected and why; equal layers are profiled once."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from support.exhaustive import by_default
from support.planner_cases import SCHEDULE, bundled, cluster, of_three_axes, planned
from support.runs import random_init, summed_loss, tiny_config
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.planner.layout_search import Plan, SearchRequest, plan
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import StageLoad
from axsparse.samo.optim.adamw import ADAMW

BIG = cluster(memory_bytes=1e12)


@cache
def made(config: str, density: float, gpus: int) -> Plan:
    return planned(config, density, gpus=gpus, global_batch_size=128, schedules=[SCHEDULE])


@pytest.mark.parametrize(("density", "expected"), [(1.0, 4), (0.1, 1)])
def test_the_smallest_pipeline_that_fits_is_recommended_and_others_come_by_time(
    density: float, expected: int
) -> None:
    found = made("gpt3_2.7b", density, 64)

    best, others = found.recommended, found.rows[1:]
    assert best.layout.grid.g_inter == expected
    assert min(row.layout.grid.g_inter for row in found.rows) == expected
    same = [row for row in found.rows if row.layout.grid.g_inter == expected]
    assert best.seconds == min(row.seconds for row in same)
    assert [row.seconds for row in others] == sorted(row.seconds for row in others)
    assert [found.margin(row) for row in found.rows] == [
        row.seconds / best.seconds - 1 for row in found.rows
    ]


def test_every_layout_is_either_a_row_or_rejected_with_a_reason() -> None:
    found = made("gpt3_2.7b", 1.0, 64)

    stages = {row.layout.grid.g_inter for row in found.rows} | {r.g_inter for r in found.rejected}
    assert stages == {2**n for n in range(7)}
    [smaller] = [r for r in found.rejected if r.g_inter == 2]
    assert (smaller.reason, smaller.microbatch_size) == ("stage 0 needs 26.6 GB of 17.2", 1)


def test_every_row_fits_and_counts_its_flops() -> None:
    found = made("gpt3_2.7b", 0.1, 64)

    for row in found.rows:
        assert row.most_bytes == row.memory[row.fullest].total <= found.request.rank_budget
        assert row.most_bytes == max(stage.total for stage in row.memory)
        assert row.layout.grid.g_data * row.layout.microbatches * row.layout.microbatch_size == 128
        flops = 128 * found.request.model.sample_flops
        assert row.percent_of_peak == pytest.approx(100 * flops / (row.seconds * 64 * 125e12))


# -- split backwards ------------------------------------------------------------------------


def test_backwards_are_split_where_there_are_several_stages() -> None:
    settings = {"pipeline.split_backward": "auto", "pipeline.checkpoint_activations": 0}
    found = plan(
        SearchRequest(
            model=bundled("gpt3_xl", 0.1).with_values(settings),
            cluster=BIG,
            gpus=2,
            global_batch_size=8,
            microbatch_sizes=[1],
            rank_budget=BIG.memory_bytes,
        )
    )

    rows = {row.layout.grid.g_inter: row.layout.schedule.split_backward for row in found.rows}
    assert rows == {1: False, 2: True}


# -- tensor-parallel ranks ------------------------------------------------------------------


def test_layouts_of_several_members_are_rows_or_rejected() -> None:
    found = of_three_axes(2)

    assert {row.layout.grid.g_inter for row in found.rows} == {1, 2, 4}
    for row in found.rows:
        assert (row.layout.grid.size, row.layout.grid.g_tensor) == (8, 2)
        assert row.percent_of_peak == pytest.approx(
            100 * 8 * found.request.model.sample_flops / (row.seconds * 8 * 1e9)
        )


LAYERS = 1000
BUILT: list[int] = []


def linear(width: int, outputs: int) -> nn.Module:
    BUILT.append(width)
    return nn.Linear(width, outputs)


def deep_model(layers: int = LAYERS) -> Model:
    """Equal layers between two others."""
    widths = [(8, 16), *[(16, 16)] * (layers - 2), (16, 3)]
    made = [
        Layer(f"l{number}", partial(linear, *width), init=random_init)
        for number, width in enumerate(widths)
    ]
    return Model(made, summed_loss, example=lambda samples: (torch.zeros(samples, 8),))


def test_equal_layers_are_built_and_run_once() -> None:
    BUILT.clear()

    found = profile(deep_model())

    assert len(BUILT) == 3
    assert [layer.parameters[0].name for layer in found.layers[:3]] == [
        *("l0.weight", "l1.weight", "l2.weight")
    ]
    one_by_one = [Layer(f"l{n}", lambda: nn.Linear(16, 16)) for n in range(3)]
    alike = [Layer(f"l{n}", partial(nn.Linear, 16, 16)) for n in range(3)]

    def example(samples: int) -> tuple[Tensor, ...]:
        return (torch.zeros(samples, 16),)

    first, second = (
        profile(Model(layers, summed_loss, example=example)) for layers in (one_by_one, alike)
    )
    assert first == second


@pytest.mark.parametrize("stages", by_default([16], [2, 16, 250]))
def test_few_loads_are_made_and_they_are_those_of_the_stages(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a little more than an equal share, and less of it on the first stage."""
    model = ProfiledModel(tiny_config(), profile(deep_model()), {}, ADAMW)
    limit = [1.3 * LAYERS / stages] * stages
    limit[0] = 0.9 * LAYERS / stages
    made, new_load = list[range](), ProfiledModel._new_load

    def counted(self: ProfiledModel, numbers: range, g_data: int, half: bool) -> StageLoad:
        made.append(numbers)
        return new_load(self, numbers, g_data, half)

    monkeypatch.setattr(ProfiledModel, "_new_load", counted)

    def fits_budget(stage: int, load: StageLoad) -> bool:
        return load.trained <= 272 * limit[stage]

    loads = model.stages(stages, 1, fits_budget)

    assert loads is not None
    assert len(made) < 300, "not one for each pair of first and last layer"
    for load in loads:
        numbers = load.numbers
        fresh = new_load(model, numbers, 1, False)
        names = [f"l{numbers[0]}", f"l{numbers[-1]}"]
        assert load.layers == "–".join(dict.fromkeys(names))
        assert (load.state, load.held, load.flops, load.loss_bytes(1)) == (
            *(fresh.state, fresh.held, fresh.flops, fresh.loss_bytes(1)),
        )
