"""Full simulated steps: exact cases, phases, placement, jitter, many ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import peak_in_flight
from support.planner_cases import cluster, schedule, uniform

from axsparse.pipeline.schedules import ScheduleName
from axsparse.planner.stage_memory import most_in_flight
from axsparse.planner.step_cost import StageSeconds, StepCosts
from axsparse.planner.step_simulation import STEP_PHASES, durations, simulate_step
from axsparse.runtime.grid import Grid

NAMES: tuple[ScheduleName, ...] = ("message-driven", "1f1b", "gpipe")
UNIT_LINKS = {"intra_node_bandwidth": 1.0, "inter_node_bandwidth": 1.0}


def test_one_stage_has_neither_messages_nor_a_bubble() -> None:
    costs = uniform(1, 1, 2, all_reduce=3, optimizer=4, compress=0.5)

    run = simulate_step(costs, cluster(), Grid(1, 8), schedule(), 6)

    assert run.seconds == 6 * 3 + 3 + 4
    assert run.mean_phases == dict(zip(STEP_PHASES, (6 * 2.5, 6 * 0.5, 4, 0, 0, 3), strict=True))


def test_a_steady_pipeline_spends_four_messages_a_microbatch_on_an_inner_stage() -> None:
    run = simulate_step(
        uniform(4, 10, 30, message=1.0), cluster(**UNIT_LINKS), Grid(4, 1), schedule(), 16
    )

    assert [stage["p2p"] for stage in run.phases] == [32, 64, 64, 32]
    # M (τ + 4x) + (P − 1) (τ + 4x), of which first and last stage save a little.
    assert run.seconds == pytest.approx(19 * 44, rel=0.05)


def test_each_stage_reduces_when_it_is_done_and_all_update_together() -> None:
    costs = StepCosts(
        stages=[StageSeconds(1, 2, 0)] * 2,
        messages=[0.0],
        all_reduce=[1.0, 9.0],
        optimizer=[2.0, 5.0],
    )

    run = simulate_step(costs, cluster(), Grid(2, 2), schedule(), 1)

    # Stage 1 has its backward done at 4 and reduces until 13; stage 0 at 6, until 7.
    assert run.seconds == 13 + 5
    assert [stage["bubble"] for stage in run.phases] == [18 - 3 - 1 - 2, 18 - 3 - 9 - 5]


def test_a_column_waits_for_its_slowest_replica() -> None:
    machine = cluster(
        gpus_per_node=4, inter_node_bandwidth=0.25, intra_node_bandwidth=1.0, jitter=0.0
    )
    costs = uniform(3, 1, 1, message=1.0)

    run = simulate_step(costs, machine, Grid(3, 4), schedule(), 2)

    seconds = [pipeline.seconds for pipeline in run.pipelines.values()]
    assert len(set(seconds)) > 1
    assert run.seconds == max(seconds)


def test_of_replicas_that_are_alike_one_is_played() -> None:
    costs = uniform(4, 1, 1, message=1.0)

    def played(**links: float) -> list[int]:
        machine = cluster(gpus_per_node=6, **links)
        return list(simulate_step(costs, machine, Grid(4, 100), schedule(), 1).pipelines)

    # Ranks 4-7 cross a border of nodes of six, 0-3 and 8-11 do not.
    assert played(inter_node_bandwidth=1.0, intra_node_bandwidth=2.0) == [0, 1]
    assert played(inter_node_bandwidth=1.0, intra_node_bandwidth=1.0) == [0]


def test_jitter_is_the_same_for_two_schedules_and_has_mean_one() -> None:
    stages = [StageSeconds(1.0, 2.0, 0.0)] * 2

    one, same = (durations(stages, 4000, 0.2, "0 3") for _ in range(2))
    other = durations(stages, 4000, 0.2, "0 4")

    assert one == same
    assert one != other
    for row, mean in ((one.forward[0], 1.0), (one.backward[1], 2.0)):
        assert sum(row) / len(row) == pytest.approx(mean, rel=0.02)
        assert len(set(row)) > 3000


def test_with_jitter_every_replica_is_played_unless_a_sample_will_do() -> None:
    shaky = cluster(jitter=0.1)
    costs = uniform(2, 1, 1)

    every = simulate_step(costs, shaky, Grid(2, 12), schedule(), 4)
    some = simulate_step(costs, shaky, Grid(2, 12), schedule(), 4, most_replicas=3)

    assert list(every.pipelines) == list(range(12))
    assert len({run.seconds for run in every.pipelines.values()}) == 12
    assert list(some.pipelines) == [0, 1, 2]
    assert every.seconds >= some.seconds


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    g_inter=st.integers(1, 6),
    g_data=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    extra_in_flight=st.integers(0, 3),
    message=st.sampled_from([0.0, 0.3, 2.0]),
    jitter=st.sampled_from([0.0, 0.3]),
)
def test_any_step_keeps_its_promises(
    name: ScheduleName,
    g_inter: int,
    g_data: int,
    microbatches: int,
    extra_in_flight: int,
    message: float,
    jitter: float,
) -> None:
    order = schedule(name, extra_in_flight)
    costs = uniform(g_inter, 1, 2, message=message, all_reduce=0.5, optimizer=0.25, compress=0.5)

    run = simulate_step(
        costs, cluster(jitter=jitter, **UNIT_LINKS), Grid(g_inter, g_data), order, microbatches
    )

    for stage in run.phases:
        assert sorted(stage) == sorted(STEP_PHASES)
        assert sum(stage.values()) == pytest.approx(run.seconds)
        assert min(stage.values()) >= -1e-9
    for pipeline in run.pipelines.values():
        for number, stage_run in enumerate(pipeline.stages):
            bound = most_in_flight(order, stage=number, g_inter=g_inter, microbatches=microbatches)
            assert len(stage_run.actions) == 2 * microbatches
            assert peak_in_flight(stage_run.actions, 0.0) <= bound
