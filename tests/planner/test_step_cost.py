"""Seconds from sizes and constants, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_cases import SCHEDULE, bundled, cluster, load_of, uniform

from axsparse.pipeline.simulator import MessageCost
from axsparse.planner.cluster import load_cluster
from axsparse.planner.step_cost import (
    PLAYED_REPLICAS,
    STEP_PHASES,
    Group,
    StageSeconds,
    StepCosts,
    all_reduce_seconds,
    durations,
    edges,
    group,
    optimizer_seconds,
    ring_seconds,
    simulate_step,
    stage_seconds,
    step_costs,
    sum_seconds,
    with_gather,
)
from axsparse.runtime.communication import Sums
from axsparse.runtime.grid import Grid
from axsparse.samo.state_bytes import StateBytes

LOAD = load_of(
    flops=100.0,
    moved=30.0,
    again_flops=60.0,
    again_moved=10.0,
    trained=500,
    kept=50,
    state=StateBytes(weight=1000, index=200, gradient=100, master=200, optimizer=400),
    outputs=24.0,
)
ROUND = cluster(
    peak_fp16=20.0, efficiency=0.5, memory_bandwidth=5.0, compression_rate=100.0, gpus_per_node=6
)


def test_a_backward_is_two_forwards_what_is_computed_again_and_the_compression() -> None:
    dense = stage_seconds(bundled("gpt3_xl"), LOAD, ROUND, 3)
    pruned = stage_seconds(bundled("gpt3_xl", 0.1), LOAD, ROUND, 3)

    forward, again = 100 / 10 + 30 / 5, 60 / 10 + 10 / 5
    assert dense.forward == pruned.forward == 3 * forward
    assert (dense.backward, dense.compress) == (3 * (2 * forward + again), 0)
    assert (pruned.backward, pruned.compress) == (3 * (2 * forward + again) + 5, 5)


@pytest.mark.parametrize(
    ("state", "link", "seconds"),
    [
        ({}, None, (100 + 200 + 2 * (200 + 400) + 2 * 50) / 5),
        ({"master": 50, "optimizer": 100}, None, (100 + 200 + 2 * (50 + 100) + 2 * 50) / 5),
        # Offloaded state comes and goes while the optimizer works.
        ({"master": 0, "optimizer": 0, "offloaded": 600}, 0.5, 1200.0),
        ({"master": 0, "optimizer": 0, "offloaded": 600}, 50.0, 320.0),
    ],
)
def test_the_optimizer_reads_and_writes_masters_and_moments(
    state: dict[str, int], link: float | None, seconds: float
) -> None:
    load = replace(LOAD, state=replace(LOAD.state, **state))

    assert optimizer_seconds(load, replace(ROUND, host_bandwidth=link), weight_bytes=2) == seconds


@pytest.mark.parametrize(
    ("g_tensor", "on_node", "seconds"),
    [
        (1, 8, 0.0),
        (2, 8, 3 * 70 / 100 + 5 * 2 * 0.25),
        (4, 8, 3 * 70 / 100 + 5 * 6 * 0.25),
        (8, 8, 3 * 70 / 100 + 5 * 14 * 0.25),
        # One ring passes the cards of two nodes.
        (8, 4, 3 * 70 / 40 + 5 * 14 * 0.5),
    ],
)
def test_members_sum_by_a_ring(g_tensor: int, on_node: int, seconds: float) -> None:
    machine = replace(MACHINE, gpus_per_node=on_node)

    assert sum_seconds(Sums(70, 5), machine, 3, g_tensor) == pytest.approx(seconds)
    # What does not grow with the samples is sent once.
    assert sum_seconds(Sums(60, 5, 30), machine, 3, g_tensor) == pytest.approx(seconds)


def test_a_pass_takes_its_sums_on_top_and_weight_gradients_take_none() -> None:
    model = bundled("gpt3_xl")
    machine = replace(MACHINE, gpus_per_node=6, peak_fp16=20.0, efficiency=0.5)
    summing = replace(LOAD, forward_sums=Sums(40, 2), backward_sums=Sums(80, 3), weight_flops=10.0)
    alone, shared = (stage_seconds(model, each, machine, 3, 2) for each in (LOAD, summing))

    assert shared.forward_sums == pytest.approx(3 * 40 / 100 + 2 * 2 * 0.25)
    assert shared.backward_sums == pytest.approx(3 * 80 / 100 + 3 * 2 * 0.25)
    assert shared.forward == pytest.approx(alone.forward + shared.forward_sums)
    assert shared.backward == pytest.approx(alone.backward + shared.backward_sums)
    assert shared.weight == pytest.approx(3 * 10 / 10)


def test_members_stand_next_to_each_other_and_share_the_cards_of_their_node() -> None:
    costs = uniform(3, 1, 1, message=24.0)
    machine = replace(
        MACHINE,
        gpus_per_node=4,
        intra_node_bandwidth=12.0,
        intra_node_latency=0.5,
        inter_node_bandwidth=96.0,
        inter_node_latency=3.0,
    )
    near, far = MessageCost(0.5, 2.0), MessageCost(3.0, 24 / (2 * 80 / 2))

    # Nodes of four: two stages of two tensor-parallel ranks each.
    assert edges(costs, machine, Grid(3, 2, 2), 0) == [near, far]
    assert edges(costs, machine, Grid(3, 2, 2), 1) == [far, near]
    # Replicas are six ranks apart, one on a node, and four rings share each node's card.
    assert all_reduce_seconds(60, machine, Grid(3, 2, 2)) == pytest.approx(60 / (40 / 4) + 2 * 0.5)


MACHINE = cluster(
    ring_bandwidth=100.0,
    ring_latency=0.5,
    node_ring_latency=0.25,
    nic_bandwidth=80.0,
    nic_efficiency=0.5,
    peer_bandwidth=None,
)


@pytest.mark.parametrize(
    ("ranks", "constants", "rate", "hop"),
    [
        (Group(4, 4, 1), {}, 100.0, 0.25),
        # Between nodes rings share the cards, and are no faster than within one.
        (Group(16, 1, 8), {}, 40 / 8, 0.5),
        (Group(16, 2, 4), {}, 40 / 4, 0.5),
        (Group(16, 8, 1), {}, 40.0, 0.5),
        (Group(16, 8, 1), {"nic_bandwidth": 1e9}, 100.0, 0.5),
        # Few devices without a switch have few links.
        (Group(2, 2, 1), {"peer_bandwidth": 20.0}, 20.0, 0.25),
        (Group(4, 4, 1), {"peer_bandwidth": 20.0}, 60.0, 0.25),
        (Group(8, 8, 1), {"peer_bandwidth": 20.0}, 100.0, 0.25),
    ],
)
def test_an_all_reduce_is_a_ring_with_the_rate_of_its_links_or_its_share_of_the_cards(
    ranks: Group, constants: dict[str, float], rate: float, hop: float
) -> None:
    hops = 2 * (ranks.size - 1)

    seconds = ring_seconds(1000.0, ranks, replace(MACHINE, **constants))  # type: ignore[arg-type]

    assert seconds == pytest.approx(hops / ranks.size * 1000 / rate + hops * hop)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (Grid(1, 8), Group(8, 6, 1)),
        (Grid(2, 8), Group(8, 3, 2)),
        (Grid(6, 8), Group(8, 1, 6)),
        (Grid(32, 8), Group(8, 1, 6)),
        (Grid(2, 3), Group(3, 3, 1)),
    ],
)
def test_as_many_rings_share_a_node_as_stages_stand_on_it(grid: Grid, expected: Group) -> None:
    machine = replace(MACHINE, gpus_per_node=6)

    assert group(grid.g_data, grid.g_inter, 6) == expected
    assert all_reduce_seconds(80.0, machine, grid) == ring_seconds(80.0, expected, machine)
    assert all_reduce_seconds(80.0, machine, Grid(grid.g_inter, 1)) == 0


UNIT_LINKS = {"intra_node_bandwidth": 1.0, "inter_node_bandwidth": 1.0}


def test_one_stage_has_neither_messages_nor_a_bubble() -> None:
    costs = uniform(1, 1, 2, all_reduce=3, optimizer=4, compress=0.5)

    run = simulate_step(costs, cluster(), Grid(1, 8), SCHEDULE, 6)

    assert run.seconds == 6 * 3 + 3 + 4
    assert run.mean_phases == dict(zip(STEP_PHASES, (6 * 2.5, 6 * 0.5, 4, 0, 0, 3), strict=True))


def test_a_steady_pipeline_spends_four_messages_a_microbatch_on_an_inner_stage() -> None:
    run = simulate_step(
        uniform(4, 10, 30, message=1.0), cluster(**UNIT_LINKS), Grid(4, 1), SCHEDULE, 16
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

    run = simulate_step(costs, cluster(), Grid(2, 2), SCHEDULE, 1)

    # Stage 1 has its backward done at 4 and reduces until 13; stage 0 at 6, until 7.
    assert run.seconds == 13 + 5
    assert [stage["bubble"] for stage in run.phases] == [18 - 3 - 1 - 2, 18 - 3 - 9 - 5]


def test_a_column_waits_for_its_slowest_replica() -> None:
    machine = cluster(
        gpus_per_node=4, inter_node_bandwidth=0.25, intra_node_bandwidth=1.0, jitter=0.0
    )
    costs = uniform(3, 1, 1, message=1.0)

    run = simulate_step(costs, machine, Grid(3, 4), SCHEDULE, 2)

    seconds = [pipeline.seconds for pipeline in run.pipelines.values()]
    assert len(set(seconds)) > 1
    assert run.seconds == max(seconds)


def test_of_replicas_that_are_alike_one_is_played() -> None:
    costs = uniform(4, 1, 1, message=1.0)

    def played(**links: float) -> list[int]:
        machine = cluster(gpus_per_node=6, **links)
        return list(simulate_step(costs, machine, Grid(4, 100), SCHEDULE, 1).pipelines)

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


def test_with_jitter_a_sample_of_the_replicas_is_played() -> None:
    run = simulate_step(uniform(2, 1, 1), cluster(jitter=0.1), Grid(2, 12), SCHEDULE, 4)

    assert list(run.pipelines) == list(range(PLAYED_REPLICAS))
    assert len({pipeline.seconds for pipeline in run.pipelines.values()}) == PLAYED_REPLICAS


def test_weights_are_gathered_in_all_passes_but_a_steps_first() -> None:
    stage = StageSeconds(forward=4.0, backward=10.0, compress=0.0)
    assert not ROUND.is_of_hosts

    assert with_gather(stage, 3.0, ROUND, 4) == stage, "it is hidden behind compute"
    assert with_gather(stage, 8.0, ROUND, 4) == replace(stage, forward=6.0)
    assert with_gather(stage, 8.0, ROUND, 1) == stage
    hosts = load_cluster("laptop")
    assert hosts.is_of_hosts
    assert with_gather(stage, 8.0, hosts, 4) == replace(stage, forward=10.0, backward=16.0)
    load = replace(LOAD, gathered=1e3)
    grid, ring = Grid(1, 2), all_reduce_seconds(1e3, ROUND, Grid(1, 2)) / 2
    [costs] = step_costs(bundled("gpt3_xl"), [load], ROUND, grid, 1, 2).stages
    plain = stage_seconds(bundled("gpt3_xl"), LOAD, ROUND, 1)
    assert costs == with_gather(plain, ring, ROUND, 2)
