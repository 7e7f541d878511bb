"""Rings by hand: within a node, without a switch, and between nodes."""

from __future__ import annotations

import pytest
from support.published_runs import selene

from axsparse.planner.collective_cost import ring_seconds
from axsparse.planner.node_placement import Group

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
