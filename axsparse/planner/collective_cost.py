"""The seconds of collectives as rings, by the nodes that a group stands on.

For D ranks and n bytes an all-reduce takes 2 (D − 1) / D · n / rate + 2 (D − 1) · α. A ring between
nodes has its share of a node's network cards: their rate over the number of such rings on the node.
"""

from __future__ import annotations

from axsparse.planner.cluster import Cluster
from axsparse.planner.node_placement import Group


def ring_seconds(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of an all-reduce over a group of ranks; a reduce-scatter or an all-gather of the same
    bytes takes half."""
    if group.size == 1:
        return 0.0
    hops, latency = 2 * (group.size - 1), cluster.ring_latency
    if group.within_node and cluster.node_ring_latency is not None:
        latency = cluster.node_ring_latency
    return hops / group.size * nbytes / _rate(group, cluster) + hops * latency


def _rate(group: Group, cluster: Cluster) -> float:
    """Bytes/s that a ring over a group moves on each device."""
    within = cluster.ring_bandwidth
    if cluster.peer_bandwidth is not None:
        # Without a switch, few devices have few links among them.
        within = min(within, (group.on_node - 1) * cluster.peer_bandwidth)
    if group.within_node:
        return within
    between = cluster.nic_efficiency * cluster.nic_bandwidth / group.sharing
    return min(between, within) if group.on_node > 1 else between
