"""Plans: what is recommended, what is rejected and why, and what slack is worth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from support.planner_cases import SUMMIT, cluster, formula, schedule

from axsparse.planner.cluster import Cluster
from axsparse.planner.layout import LayoutQuestion, Row
from axsparse.planner.layout_search import Plan, plan
from axsparse.planner.schedule_choice import MOST_ROOM, PAYS, SlackPoint, Trade
from axsparse.planner.step_cost import StageSeconds, StepCosts, step_costs
from axsparse.planner.workload import StageLoad, Workload
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid


@cache
def made(config: str, density: float, gpus: int) -> Plan:
    return plan(
        LayoutQuestion(
            workload=formula(config, density),
            cluster=SUMMIT,
            gpus=gpus,
            global_batch_size=512,
            schedule=schedule(),
        )
    )


@pytest.mark.parametrize(("density", "expected"), [(1.0, 8), (0.1, 2)])
def test_the_smallest_pipeline_that_fits_is_recommended(density: float, expected: int) -> None:
    found = made("gpt3_2.7b", density, 64)

    assert found.recommended.layout.grid.g_inter == expected
    assert min(row.layout.grid.g_inter for row in found.rows) == expected
    same = [row for row in found.rows if row.layout.grid.g_inter == expected]
    assert found.recommended.seconds == min(row.seconds for row in same)


def test_runners_up_come_by_predicted_step_with_their_margins() -> None:
    found = made("gpt3_2.7b", 0.1, 64)

    seconds = [row.seconds for row in found.rows[1:]]
    assert seconds == sorted(seconds)
    assert found.margin(found.recommended) == 0
    slower = found.rows[-1]
    assert found.margin(slower) == slower.seconds / found.recommended.seconds - 1


def test_every_layout_is_either_a_row_or_rejected_with_a_reason() -> None:
    found = made("gpt3_2.7b", 1.0, 64)

    assert {row.layout.grid.g_inter for row in found.rows} | {
        r.g_inter for r in found.rejected
    } == {
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    }
    smaller = [r for r in found.rejected if r.g_inter == 4]
    assert [r.reason for r in smaller] == ["stage 3 needs 17.4 GB of 17.2"]
    assert smaller[0].microbatch_size == 1


def test_what_can_not_run_at_all_says_so() -> None:
    sizes = plan(
        LayoutQuestion(
            workload=formula("gpt3_xl", 0.1),
            cluster=SUMMIT,
            gpus=48,
            global_batch_size=48,
            schedule=schedule(),
            g_inter=[5, 48, 1],
            microbatch_sizes=[1, 2],
        )
    )
    batch = plan(
        LayoutQuestion(
            workload=formula("gpt3_xl", 0.1),
            cluster=SUMMIT,
            gpus=48,
            global_batch_size=12,
            schedule=schedule(),
            g_inter=[1, 4],
            microbatch_sizes=[1],
        )
    )
    deep = made("gpt3_2.7b", 0.1, 128)

    assert [r.reason for r in sizes.rejected] == [
        "5 does not divide 48 devices",
        "microbatches of 2 do not divide 1 samples",
    ]
    assert [r.reason for r in batch.rejected] == ["48 replicas do not divide a batch of 12"]
    assert deep.rejected[-1].reason == "the model can be cut into 64 stages at most"


def test_every_row_fits_and_counts_its_flops() -> None:
    found = made("gpt3_2.7b", 0.1, 64)

    for row in found.rows:
        assert max(stage.total for stage in row.memory) <= found.memory_bytes
        assert row.memory[row.fullest].total == max(stage.total for stage in row.memory)
        assert row.layout.grid.g_data * row.layout.microbatches * row.layout.microbatch_size == 512
        flops = 512 * found.workload.sample_flops
        assert row.percent_of_peak == pytest.approx(100 * flops / (row.seconds * 64 * 125e12))


def test_less_memory_takes_more_stages() -> None:
    roomy = made("gpt3_2.7b", 0.1, 64)
    tight = plan(
        LayoutQuestion(
            workload=formula("gpt3_2.7b", 0.1),
            cluster=SUMMIT,
            gpus=64,
            global_batch_size=512,
            schedule=schedule(),
            memory_bytes=8e9,
        )
    )

    assert tight.recommended.layout.grid.g_inter > roomy.recommended.layout.grid.g_inter
    assert tight.memory_bytes == 8e9


def test_a_model_that_fits_nowhere_is_told_the_nearest_miss() -> None:
    with pytest.raises(
        ConfigError, match=r"gpt3_13b fits no layout of 2 devices of summit; with 2"
    ):
        made("gpt3_13b", 1.0, 2)
    with pytest.raises(ConfigError, match="0 devices train nothing; plan for at least 1"):
        made("gpt3_13b", 1.0, 0)


def test_measured_costs_can_take_the_place_of_formulas() -> None:
    def slow(
        workload: Workload,
        loads: Sequence[StageLoad],
        machine: Cluster,
        grid: Grid,
        microbatch_size: int,
    ) -> StepCosts:
        costs = step_costs(workload, loads, machine, grid, microbatch_size)
        return replace(costs, stages=[StageSeconds(100.0, 200.0, 0.0)] * len(loads))

    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_xl", 0.1),
            cluster=SUMMIT,
            gpus=4,
            global_batch_size=8,
            schedule=schedule(),
            g_inter=[1],
            microbatch_sizes=[2],
            costing=slow,
        )
    )

    assert found.recommended.run.mean_phases["compute"] == 300.0


@pytest.mark.parametrize(
    ("memory", "seconds", "fits", "is_taken"),
    [
        (0.27, -0.07, True, False),
        (0.20, -0.07, True, True),
        (0.20, -0.07, False, False),
        (0.0, -0.004, True, False),
        (0.0, -0.006, True, True),
        (0.001, 0.02, True, False),
    ],
)
def test_an_option_is_taken_for_one_percent_of_time_for_three_of_memory(
    memory: float, seconds: float, fits: bool, is_taken: bool
) -> None:
    assert Trade("slack 2", memory, seconds, fits).is_taken is is_taken


def test_a_trade_says_what_an_option_costs_and_brings() -> None:
    said = [str(Trade("split backwards", memory, -0.07, fits=True)) for memory in (0.27, 0.1)]

    assert said == [
        "split backwards: +27 % memory for −7 % time: not taken",
        "split backwards: +10 % memory for −7 % time: taken",
    ]


def curve(machine: Cluster, room: float | None = None) -> tuple[Row, list[SlackPoint]]:
    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_13b", 0.1),
            cluster=machine,
            gpus=64,
            global_batch_size=256,
            g_inter=[8],
            microbatch_sizes=[1],
            memory_bytes=room,
            split_backward=False,
        )
    )
    return found.recommended, list(found.slack_curve)


def test_jitter_makes_slack_worth_its_memory() -> None:
    calm, calm_curve = curve(cluster(intra_node_bandwidth=1e15, inter_node_bandwidth=1e15))
    shaky, points = curve(cluster(jitter=0.5))

    assert calm.layout.schedule.slack == 0
    assert [point.slack for point in points] == [point.slack for point in calm_curve] == [*range(9)]
    assert shaky.layout.schedule.slack >= 1
    assert points[shaky.layout.schedule.slack].seconds == shaky.seconds
    flops = 256 * formula("gpt3_13b").sample_flops
    assert shaky.percent_of_peak == pytest.approx(100 * flops / (shaky.seconds * 64 * 125e12))
    assert points[shaky.layout.schedule.slack].seconds < 0.95 * points[0].seconds
    assert [point.bytes for point in points] == sorted(point.bytes for point in points)


def test_slack_stays_within_the_memory() -> None:
    _, whole = curve(cluster(jitter=0.5))
    room = whole[2].bytes

    row, points = curve(cluster(jitter=0.5), room)

    assert [point.slack for point in points] == [0, 1, 2]
    assert max(stage.total for stage in row.memory) <= room


def test_a_model_with_no_room_for_slack_runs_without() -> None:
    _, whole = curve(cluster(jitter=0.5))

    row, points = curve(cluster(jitter=0.5), whole[0].bytes)

    assert (row.layout.schedule.slack, [point.slack for point in points]) == (0, [0])


# -- split backwards ------------------------------------------------------------------------


def with_either_backward(room: float | None = None, jitter: float = 0.0) -> Plan:
    question = LayoutQuestion(
        workload=formula("gpt3_13b", 0.1),
        cluster=cluster(jitter=jitter),
        gpus=64,
        global_batch_size=128,
        g_inter=[8],
        microbatch_sizes=[1],
        memory_bytes=room,
    )
    return plan(question)


def test_backwards_are_split_where_that_pays_and_the_plan_says_what_each_way_gives() -> None:
    found = with_either_backward()

    best = found.recommended
    whole, *split = found.tried
    assert best.layout.schedule.split_backward
    assert not whole.schedule.split_backward
    assert all(point.schedule.split_backward for point in split)
    assert best.seconds <= (1 - PAYS) * whole.seconds
    assert (
        min(point.seconds for point in split)
        <= best.seconds
        <= (1 + PAYS) * min(point.seconds for point in split)
    )
    assert len({point.schedule.held for point in split}) == 3


def test_weight_gradients_wait_within_the_memory() -> None:
    free = with_either_backward()
    whole = next(point for point in free.tried if not point.schedule.split_backward)
    least = min(point.bytes for point in free.tried if point.schedule.split_backward)

    room = least / MOST_ROOM
    tight, none = with_either_backward(room), with_either_backward(whole.bytes)

    assert tight.recommended.layout.schedule.split_backward
    assert all(point.bytes <= room for point in tight.tried)
    assert tight.recommended.most_bytes <= MOST_ROOM * room
    assert not none.recommended.layout.schedule.split_backward
    assert [point.schedule.split_backward for point in none.tried] == [False]


@pytest.mark.parametrize(("g_inter", "batch"), [(1, 64), (8, 1)])
def test_one_stage_or_microbatch_has_nothing_to_fill(g_inter: int, batch: int) -> None:
    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_xl", 0.1),
            cluster=cluster(),
            gpus=g_inter,
            global_batch_size=batch,
            g_inter=[g_inter],
            microbatch_sizes=[1],
        )
    )

    assert not found.recommended.layout.schedule.split_backward
    assert len(found.tried) == 1


def test_the_search_needs_neither_torch_nor_mpi_nor_numpy() -> None:
    script = (
        "import sys; import axsparse.planner.layout_search; "
        "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )

    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (shown.stdout, shown.stderr) == ("[]\n", "")
