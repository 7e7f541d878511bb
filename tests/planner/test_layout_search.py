"""Plans: what is recommended, what is rejected and why; equal layers are profiled once."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.planner_cases import cluster, of_three_axes, planned, schedule
from support.runs import random_init, summed_loss, tiny_config
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.planner.layout_search import Plan
from axsparse.planner.plan_report import because
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import StageLoad
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

BIG = cluster(memory_bytes=1e12)


@cache
def made(config: str, density: float, gpus: int) -> Plan:
    return planned(config, density, gpus=gpus, global_batch_size=128, schedules=[schedule()])


@pytest.mark.parametrize(("density", "expected"), [(1.0, 8), (0.1, 2)])
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
    [smaller] = [r for r in found.rejected if r.g_inter == 4]
    assert (smaller.reason, smaller.microbatch_size) == ("stage 3 needs 17.4 GB of 17.2", 1)


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        (
            {"global_batch_size": 48, "g_inter": [5, 48, 1], "microbatch_sizes": [1, 2]},
            ["5 does not divide 48 devices", "microbatches of 2 make too few of a batch of 48"],
        ),
        (
            {"global_batch_size": 12, "g_inter": [1, 4], "microbatch_sizes": [1]},
            ["48 replicas share a batch of 12"],
        ),
        (
            {"global_batch_size": 48, "g_inter": [1, 48, 96], "gpus": 96, "microbatch_sizes": [1]},
            [
                "96 replicas share a batch of 48",
                "the model can be cut into 48 stages at most",
            ],
        ),
    ],
)
def test_what_can_not_run_at_all_says_so(asked: dict[str, Any], reasons: list[str]) -> None:
    found = planned("gpt3_xl", 0.1, **{"gpus": 48, "schedules": [schedule()], **asked})

    assert [r.reason for r in found.rejected] == reasons


def test_every_row_fits_and_counts_its_flops() -> None:
    found = made("gpt3_2.7b", 0.1, 64)

    for row in found.rows:
        assert row.most_bytes == row.memory[row.fullest].total <= found.request.rank_budget
        assert row.most_bytes == max(stage.total for stage in row.memory)
        assert row.layout.grid.g_data * row.layout.microbatches * row.layout.microbatch_size == 128
        flops = 128 * found.request.model.sample_flops
        assert row.percent_of_peak == pytest.approx(100 * flops / (row.seconds * 64 * 125e12))


# -- split backwards ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, {1: False, 2: True}), (False, {1: False, 2: False})]
)
def test_backwards_are_split_where_there_are_several_stages_unless_told(
    asked: bool | None, expected: dict[int, bool]
) -> None:
    found = planned(
        "gpt3_xl",
        0.1,
        BIG,
        gpus=2,
        global_batch_size=8,
        microbatch_sizes=[1],
        split_backward=asked,
    )

    rows = {row.layout.grid.g_inter: row.layout.schedule.split_backward for row in found.rows}
    assert rows == expected


# -- tensor-parallel ranks
# ----------------------------------------------------------------------------------


def test_every_layout_of_three_axes_is_a_row_or_rejected() -> None:
    found = of_three_axes(1e9)

    tried = {(row.layout.grid.g_inter, row.layout.grid.g_tensor) for row in found.rows}
    assert tried == {(2**n, 2**m) for n in range(3) for m in range(3) if n + m <= 3}
    for row in found.rows:
        assert row.layout.grid.size == 8
        assert row.percent_of_peak == pytest.approx(
            100 * 8 * found.request.model.sample_flops / (row.seconds * 8 * 1e9)
        )
    reasons = {(each.g_inter, each.g_tensor): each.reason for each in found.rejected}
    assert reasons[1, 8].startswith("layout.g_tensor (default): 8 does not divide the 32 out")
    assert reasons[8, 1] == "the model can be cut into 4 stages at most"


def test_of_the_smallest_model_parallelism_that_fits_the_fastest_is_taken() -> None:
    roomy = of_three_axes(1e9)
    alone = roomy.recommended.most_bytes
    grids = []
    for latency in (0.0, 1.0):
        tight = of_three_axes(0.9 * alone, ring_latency=latency, intra_node_latency=latency / 10)
        grid = tight.recommended.layout.grid
        rivals = [row for row in tight.rows if row.layout.grid.parallelism == grid.parallelism]
        grids.append(grid)
        assert min(row.layout.grid.parallelism for row in tight.rows) == grid.parallelism > 1
        assert tight.recommended.seconds == min(row.seconds for row in rivals)
        assert len({row.layout.grid.g_inter for row in rivals}) > 1
        assert "fewer devices for a copy of the model do not do (with 1 stage: " in because(tight)
        assert "; shared out otherwise over as many, " in because(tight)

    assert roomy.recommended.layout.grid == Grid(1, 8)
    one_stage = of_three_axes(0.9 * alone, stages=[1, 8])
    assert one_stage.recommended.layout.grid == Grid(1, 4, 2)
    # Tensor-parallel ranks have many messages, stages few but a bubble.
    assert [grid.g_tensor > 1 for grid in grids] == [True, False]


@pytest.mark.parametrize(
    ("gpus", "on_node", "reasons"),
    [
        (
            12,
            6,
            {
                8: "8 tensor-parallel ranks do not divide 12 devices",
                4: "some would be on another node",
            },
        ),
        (4, 6, {8: "8 tensor-parallel ranks do not divide 4 devices"}),
        (8, 4, {8: "some would be on another node, as nodes have 4 devices"}),
    ],
)
def test_the_members_of_a_stage_stand_on_one_node(
    gpus: int, on_node: int, reasons: dict[int, str]
) -> None:
    found = of_three_axes(1e9, gpus, gpus_per_node=on_node)

    apart = {each.g_tensor: each.reason for each in found.rejected if not each.g_data}
    assert apart.keys() == reasons.keys()
    assert all(apart[g_tensor].startswith(reason) for g_tensor, reason in reasons.items())


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
