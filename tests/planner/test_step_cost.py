"""Seconds from sizes and constants, by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.planner_cases import SUMMIT, cluster, formula, uniform

from axsparse.pipeline.simulator import MessageCost
from axsparse.planner.step_cost import (
    KERNEL_BYTES,
    all_reduce_seconds,
    edges,
    optimizer_seconds,
    stage_seconds,
    step_costs,
)
from axsparse.planner.workload import StageLoad
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


def test_kernels_move_each_written_byte_several_times_where_a_cluster_says_so() -> None:
    machine = replace(ROUND, traffic=2.0)

    seen = stage_seconds(formula("gpt3_xl"), LOAD, machine, 1)

    assert seen.forward == pytest.approx(100 / 10 + KERNEL_BYTES * 2 * 30 / 5)


def test_a_pass_over_the_weights_takes_as_long_whatever_the_microbatch() -> None:
    machine = replace(ROUND, weight_rate=50.0)

    for size in (1, 3):
        seen = stage_seconds(formula("gpt3_xl", 0.1), LOAD, machine, size)
        before = stage_seconds(formula("gpt3_xl", 0.1), LOAD, ROUND, size)
        assert (seen.forward, seen.backward) == (before.forward + 10, before.backward + 20)


def test_the_optimizer_reads_and_writes_masters_and_moments() -> None:
    seconds = optimizer_seconds(LOAD, ROUND, weight_bytes=2)

    assert seconds == (100 + 200 + 2 * (200 + 400) + 2 * 50) / 5


@pytest.mark.parametrize(("link", "seconds"), [(0.5, 1200.0), (50.0, 320.0)])
def test_offloaded_state_comes_and_goes_while_the_optimizer_works(
    link: float, seconds: float
) -> None:
    state = replace(LOAD.state, master=0, optimizer=0, offloaded=600)
    machine = replace(ROUND, host_bandwidth=link)

    assert optimizer_seconds(replace(LOAD, state=state), machine, weight_bytes=2) == seconds


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


@pytest.mark.parametrize(("g_inter", "rings"), [(1, 1), (2, 2), (4, 4), (6, 6), (32, 6)])
def test_an_all_reduce_shares_the_cards_with_the_rings_of_its_node(
    g_inter: int, rings: int
) -> None:
    machine = cluster(nic_bandwidth=10.0, nic_efficiency=0.5, ring_latency=0.25)

    seconds = all_reduce_seconds(80.0, machine, Grid(g_inter, 8))

    assert seconds == pytest.approx(2 * 7 / 8 * 80 * rings / 5 + 2 * 7 * 0.25)


def test_as_many_rings_share_a_node_as_stages_stand_on_it() -> None:
    for gpus, g_inter in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 5, 8, 16)):
        machine = cluster(gpus_per_node=gpus)
        grid = Grid(g_inter, 4 * gpus)
        nodes: dict[int, set[int]] = {}
        for rank in range(grid.size):
            nodes.setdefault(machine.node_of(rank), set()).add(grid.place(rank).stage)
        assert max(map(len, nodes.values())) == min(gpus, g_inter)


def test_a_ring_within_a_node_and_a_single_replica_need_no_cards() -> None:
    machine = cluster(ring_bandwidth=4.0, ring_latency=0.0, nic_bandwidth=1e-9)

    assert all_reduce_seconds(80.0, machine, Grid(2, 3)) == pytest.approx(2 * 2 / 3 * 80 / 4)
    assert all_reduce_seconds(80.0, machine, Grid(2, 1)) == 0


def test_a_pruned_model_reduces_its_kept_gradients_only() -> None:
    dense, pruned = formula("gpt3_2.7b"), formula("gpt3_2.7b", 0.1)
    grid = Grid(2, 32)
    seconds = {}
    for workload in (dense, pruned):
        loads = workload.stages(2, 32)
        assert loads is not None
        seconds[workload.density] = step_costs(workload, loads, SUMMIT, grid, 1).all_reduce[0]

    hops = 2 * 31 * SUMMIT.ring_latency
    kept = (0.1 * dense.body_params + dense.embedding_params) / dense.num_params
    assert (seconds[0.1] - hops) / (seconds[1.0] - hops) == pytest.approx(kept, rel=1e-6)


def test_sharded_state_is_updated_faster_and_reduced_as_slowly() -> None:
    whole = optimizer_seconds(LOAD, ROUND, weight_bytes=2)
    share = replace(LOAD, state=replace(LOAD.state, master=50, optimizer=100))

    assert optimizer_seconds(share, ROUND, weight_bytes=2) == whole - 2 * (150 + 300) / 5
    assert share.kept == LOAD.kept


def test_what_a_microbatch_sends_grows_with_it() -> None:
    gpt = formula("gpt3_xl")
    loads = gpt.stages(3, 1)
    assert loads is not None

    costs = step_costs(gpt, loads, SUMMIT, Grid(3, 1), 4)

    assert costs.messages == [4 * 2 * 2048 * 2048] * 2
