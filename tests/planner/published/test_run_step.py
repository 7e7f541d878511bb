"""The seconds of a run's parts, by hand, on clusters of round numbers."""

from __future__ import annotations

from typing import Any

import pytest
from support.published_runs import SMALL, model_of, run, selene

from axsparse.planner.cluster import load_cluster
from axsparse.planner.published.piece_loads import Piece, PieceLoad
from axsparse.planner.published.run_file import RunRow
from axsparse.planner.published.run_step import predict_step, run_costs, tensor_share
from axsparse.planner.step_simulation import STEP_PHASES
from axsparse.runtime.errors import ConfigError

PLAIN = selene(traffic=None, message_overhead=None, node_ring_latency=1e-6)
"""Time is flops over the rate, and what is exchanged."""
HOP = 1e-6
"""Seconds of a hop of a ring inside a node."""
RATE = PLAIN.efficiency * 312e12
ACTIVATION = 2 * 2 * 2048 * 1536
"""Bytes of a microbatch between two blocks."""


def test_compute_is_the_models_flops_at_the_efficiency() -> None:
    row = run(recompute="full")
    found = predict_step(row, PLAIN)

    # 96 s l h² (1 + s / 6h + V / 16 l h), with full recomputation.
    s, h = 2048, 1536
    flops = 16 * 96 * s * 16 * h**2 * (1 + s / (6 * h) + 51200 / (16 * 16 * h))
    assert found.mean_phases["compute"] == pytest.approx(flops / RATE)
    assert set(found.mean_phases) == set(STEP_PHASES)
    assert sum(found.mean_phases.values()) == pytest.approx(found.seconds)


def test_bytes_that_kernels_move_come_on_top() -> None:
    row, slow = run(), selene(traffic=2.0, message_overhead=None)
    once = selene(traffic=1.0, message_overhead=None)

    seconds = [predict_step(row, each).mean_phases["compute"] for each in (PLAIN, once, slow)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    [load] = [PieceLoad(model_of(SMALL), Piece(16, 1, 1), row)]
    moved = 8 * 3 * load.forward.moved
    assert seconds[1] - seconds[0] == pytest.approx(moved / PLAIN.memory_bandwidth)


def test_tensor_parallelism_reduces_twice_in_each_pass_of_a_block() -> None:
    alone = run_costs(run(recompute="full", layout={"tensor": 1}), PLAIN)
    shared = run(recompute="full", layout={"tensor": 8})
    costs = run_costs(shared, PLAIN)

    once = 14 / 8 * ACTIVATION / PLAIN.ring_bandwidth + 14 * HOP
    # Forward, recomputation and backward of 16 blocks, embedding and head.
    assert costs.tensor[0] == pytest.approx((6 * 16 + 2) * once)
    rest = costs.forward[0][0] - (2 * 16 + 1) * once
    assert rest == pytest.approx(alone.forward[0][0] / 8)
    assert tensor_share(shared, PLAIN) == pytest.approx(8 * costs.tensor[0])


def test_a_message_between_nodes_shares_its_cards_and_is_sent_in_parts() -> None:
    layout = {"data": 2, "tensor": 4, "pipeline": 2}
    [edges] = run_costs(run(layout=layout), PLAIN).edges

    # Eight devices of a node send a quarter each, over cards that send and receive at once.
    share = ACTIVATION / 4 / min(PLAIN.inter_node_bandwidth, 2 * PLAIN.nic_bandwidth / 8)
    gather = 3 / 4 * ACTIVATION / PLAIN.ring_bandwidth + 3 * HOP
    assert edges[0].handling == pytest.approx(share + gather / 2)
    [parted] = run_costs(run(layout=layout, sequence_parallel=True), PLAIN).edges
    assert parted[0].handling == pytest.approx(share)
    beside = selene(overlapped_messages=1, node_ring_latency=HOP)
    [hidden] = run_costs(run(layout=layout), beside).edges
    assert hidden[0].handling == 2e-4
    assert hidden[0].latency == pytest.approx(3e-5 + 2 * share + gather)
    [whole] = run_costs(run(layout=layout), selene(scattered_messages=0)).edges
    assert whole[0].handling == pytest.approx(4 * share + 2e-4)


def test_gradients_are_reduced_in_their_precision_and_tied_words_between_the_ends() -> None:
    def reduction(**training: str) -> list[float]:
        asked: dict[str, Any] = dict(training)
        row = run(layout={"data": 8, "pipeline": 2}, samples=64, **asked)
        return list(run_costs(row, PLAIN).all_reduce)

    half, single = reduction(gradients="fp16"), reduction(gradients="fp32")

    words = 51200 * 1536
    first = 8 * 12 * 1536**2 + words + 2048 * 1536
    ring = 14 / 8 * 2 * first / PLAIN.ring_bandwidth
    tie = 2 * words / (0.8 * 2e11 / 8)
    latency = 14 * HOP + 2 * PLAIN.ring_latency
    assert half[0] == pytest.approx(ring + tie + latency)
    assert single[0] == pytest.approx(2 * (ring + tie) + latency)


def test_zero_1_shards_the_optimizer_and_moves_what_an_all_reduce_does() -> None:
    row = run(layout={"data": 8}, samples=64)
    sharded = run(layout={"data": 8}, samples=64, zero=1)
    plain, shards = run_costs(row, PLAIN), run_costs(sharded, PLAIN)

    assert shards.all_reduce[0] == pytest.approx(plain.all_reduce[0])
    assert shards.optimizer[0] == pytest.approx(plain.optimizer[0] / 8, rel=0.01)
    wide = run(layout={"data": 8}, samples=64, zero=1, gradients="fp32")
    # The reduce-scatter in fp32, the all-gather of weights in fp16: three halves.
    assert run_costs(wide, PLAIN).all_reduce[0] == pytest.approx(
        1.5 * plain.all_reduce[0], rel=0.01
    )


def test_zero_3_gathers_weights_while_it_computes() -> None:
    row = run(layout={"data": 64}, samples=128, micro=2, zero=3)
    slow = selene(nic_bandwidth=1e9)

    assert run_costs(row, PLAIN).all_reduce == [0.0]
    assert predict_step(row, slow).seconds > 3 * predict_step(row, PLAIN).seconds


def test_devices_without_a_switch_have_few_links_among_few() -> None:
    joined = selene(peer_bandwidth=2e10, node_ring_latency=0.0)

    def seconds(tensor: int) -> float:
        costs = run_costs(run(layout={"tensor": tensor}), joined)
        return costs.tensor[0] / (4 * 16 + 2)

    assert seconds(2) == pytest.approx(ACTIVATION / 2e10)
    assert seconds(8) == pytest.approx(14 / 8 * ACTIVATION / (7 * 2e10))


def test_profiled_times_take_the_place_of_a_middle_stages() -> None:
    whole = run(layout={"pipeline": 4}).model_dump(by_alias=True)
    whole["profiled"] = {"forward": 0.1, "backward": 0.3, "message": 0.02}
    costs = run_costs(RunRow.model_validate(whole), PLAIN)

    assert sorted(each[0] for each in costs.forward)[2] == pytest.approx(0.1)
    assert costs.forward[-1][0] > 0.1  # the head
    assert costs.edges[0][0].handling == pytest.approx(0.01)


def test_pruned_runs_compress_in_each_backward_and_reduce_what_is_kept() -> None:
    layout = {"data": 4, "pipeline": 2}
    dense, pruned = (
        run_costs(
            run(layout=layout, samples=64, schedule="message-driven", sparsity=sparsity), PLAIN
        )
        for sparsity in (0.0, 0.9)
    )

    assert dense.compress == [0.0, 0.0]
    assert pruned.compress[0] == pytest.approx(pruned.backward[0][0] - dense.backward[0][0])
    assert pruned.all_reduce[0] < dense.all_reduce[0]
    assert pruned.optimizer[0] < dense.optimizer[0]


def test_a_ring_in_a_node_has_short_hops_and_one_between_nodes_long_ones() -> None:
    costs = run_costs(run(layout={"data": 8}, samples=64), PLAIN)
    quick = run_costs(run(layout={"data": 8}, samples=64), selene(node_ring_latency=0.0))
    far = [
        run_costs(run(layout={"data": 16}, samples=64), selene(node_ring_latency=hop)).all_reduce
        for hop in (0.0, 1e-3)
    ]

    assert costs.all_reduce[0] - quick.all_reduce[0] == pytest.approx(14 * HOP)
    assert far[0] == far[1]


def test_a_precision_without_a_unit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="v100-edr: its devices have no peak_bf16"):
        predict_step(run(precision="bf16"), load_cluster("v100-edr"))
