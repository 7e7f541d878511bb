"""Rings by hand, within a node, without a switch and between nodes; who stands on which node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.collective_cost import Group, NodePlacement, ring_seconds


def selene(**constants: float) -> Cluster:
    """Selene but for some constants."""
    return replace(load_cluster("selene-a100"), **constants)  # type: ignore[arg-type]


MACHINE = selene(
    ring_bandwidth=100.0,
    ring_latency=0.5,
    node_ring_latency=0.25,
    nic_bandwidth=80.0,
    nic_efficiency=0.5,
)


def test_a_single_rank_has_nothing_to_exchange() -> None:
    assert ring_seconds(1e9, Group(1, 1, 8), MACHINE) == 0


def test_a_ring_in_a_node_has_its_links_and_its_hops() -> None:
    assert ring_seconds(100.0, Group(4, 4, 1), MACHINE) == 6 / 4 + 6 * 0.25


@pytest.mark.parametrize(("on_node", "sharing", "rate"), [(1, 8, 5.0), (2, 4, 10.0), (8, 1, 40.0)])
def test_rings_between_nodes_share_the_cards(on_node: int, sharing: int, rate: float) -> None:
    expected = 2 * 15 / 16 * 100.0 / rate + 30 * 0.5

    assert ring_seconds(100.0, Group(16, on_node, sharing), MACHINE) == pytest.approx(expected)


def test_a_ring_is_no_faster_between_nodes_than_within_them() -> None:
    fast = selene(ring_bandwidth=10.0, ring_latency=0.0, nic_bandwidth=1e9)

    assert ring_seconds(80.0, Group(16, 8, 1), fast) == 30 / 16 * 8


def test_few_devices_without_a_switch_have_few_links() -> None:
    joined = selene(peer_bandwidth=20.0, ring_bandwidth=100.0, node_ring_latency=0.0)

    found = [ring_seconds(1.0, Group(n, n, 1), joined) * n / (2 * (n - 1)) for n in (2, 4, 8)]
    assert found == pytest.approx([1 / 20, 1 / 60, 1 / 100])


# -- placement -------------------------------------------------------------------------------


def megatron(data: int, tensor: int, pipeline: int) -> NodePlacement:
    return NodePlacement(data, tensor, pipeline, gpus_per_node=8, pipeline_first=False)


def test_replicas_are_next_to_each_other_in_megatrons_order() -> None:
    placed = megatron(32, 1, 2)

    # Four whole nodes a stage: one ring with eight members on each.
    assert placed.data_group == Group(32, 8, 1)
    assert list(placed.kinds()) == [(True, True)]
    assert placed.senders == 8


def test_rings_of_replicas_share_a_nodes_cards_behind_tensor_groups() -> None:
    placed = megatron(4, 4, 2)

    assert placed.tensor_group == Group(4, 4, 1)
    assert placed.tensor_group.within_node
    assert placed.data_group == Group(4, 2, 4)
    assert not placed.data_group.within_node


def test_a_pipeline_of_neighbours_leaves_the_node_at_its_border_only() -> None:
    placed = megatron(1, 1, 16)

    [crosses] = placed.kinds()
    assert [stage for stage, out in enumerate(crosses) if out] == [7, 15]
    assert placed.senders == 1


def test_axsparse_puts_stages_next_to_each_other_and_replicas_apart() -> None:
    placed = NodePlacement(64, 1, 4, gpus_per_node=6, pipeline_first=True)

    assert placed.data_group == Group(64, 1, 4)
    # Six devices a node and four stages: the border falls after each second stage of some replicas.
    assert set(placed.kinds()) == {
        (False, False, False, False),
        (False, True, False, True),
    }


def test_a_tensor_group_beyond_a_node_is_seen() -> None:
    assert not megatron(1, 16, 1).tensor_group.within_node


def test_first_and_last_stage_share_the_cards_with_those_of_other_replicas() -> None:
    assert megatron(1, 1, 16).ends == Group(2, 1, 1)
    assert megatron(8, 1, 4).ends == Group(2, 1, 8)
    assert megatron(1, 1, 8).ends.within_node
