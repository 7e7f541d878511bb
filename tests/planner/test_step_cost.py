"""Seconds from sizes and constants, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_cases import cluster, formula, uniform

from axsparse.pipeline.simulator import MessageCost
from axsparse.planner.step_cost import (
    Group,
    all_reduce_seconds,
    edges,
    group,
    optimizer_seconds,
    ring_seconds,
    stage_seconds,
    sum_seconds,
)
from axsparse.planner.workload import StageLoad
from axsparse.runtime.communication import Sums
from axsparse.runtime.grid import Grid
from axsparse.samo.state_bytes import StateBytes

LOAD = StageLoad(
    layers="two blocks",
    flops=100.0,
    moved=30.0,
    again_flops=60.0,
    again_moved=10.0,
    trained=500,
    kept=50,
    state=StateBytes(weight=1000, index=200, gradient=100, master=200, optimizer=400),
    building=0.0,
    temporary=0.0,
    saved=0.0,
    held=0.0,
    working=0.0,
    logits=0.0,
    outputs=24.0,
)
ROUND = cluster(
    peak_fp16=20.0, efficiency=0.5, memory_bandwidth=5.0, compression_rate=100.0, gpus_per_node=6
)


def test_a_backward_is_two_forwards_what_is_computed_again_and_the_compression() -> None:
    dense = stage_seconds(formula("gpt3_xl"), LOAD, ROUND, 3)
    pruned = stage_seconds(formula("gpt3_xl", 0.1), LOAD, ROUND, 3)

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


def test_messages_cost_by_the_nodes_that_their_ranks_stand_on() -> None:
    costs = uniform(4, 1, 1, message=24.0)
    machine = cluster(
        intra_node_bandwidth=12.0,
        intra_node_latency=0.5,
        inter_node_bandwidth=2.0,
        inter_node_latency=3.0,
    )
    near, far = MessageCost(0.5, 2.0), MessageCost(3.0, 12.0)

    found = [edges(costs, machine, Grid(4, 3), replica) for replica in range(3)]

    # Nodes of six: ranks 0-3, then 4-7 with a border before 6, then 8-11 on one node.
    assert found == [[near, near, near], [near, far, near], [near, near, near]]


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
    model = formula("gpt3_xl")
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
