"""The seconds of collectives as rings, by the nodes that a group of ranks stands on.

For D ranks and n bytes an all-reduce takes 2 (D − 1) / D · n / rate + 2 (D − 1) · α. A ring between
nodes has its share of a node's network cards: their rate over the number of such rings on the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from axsparse.planner.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data with each other, such as the replicas of one stage."""

    size: int
    on_node: int
    """How many of its ranks stand on a node."""
    sharing: int
    """How many such groups have ranks on a node, and so share its network cards."""

    @property
    def within_node(self) -> bool:
        return self.on_node >= self.size


@dataclass(frozen=True)
class NodePlacement:
    """Ranks are numbered by tensor, then by data or pipeline, and fill one node after the other."""

    data: int
    tensor: int
    pipeline: int
    gpus_per_node: int
    pipeline_first: bool
    """Whether neighbouring stages are nearer than replicas, as in axsparse; in Megatron-LM the
    replicas are."""

    @property
    def tensor_group(self) -> Group:
        """The devices that share the layers of a stage."""
        return self._group(self.tensor, 1)

    @property
    def data_group(self) -> Group:
        """The replicas of a stage."""
        return self._group(self.data, self._replica_stride)

    @property
    def ends(self) -> Group:
        """The first and the last stage of a replica, which sum a tied weight's gradients."""
        apart = (self.pipeline - 1) * self._stage_stride
        first_stages = self._group(self.data, self._replica_stride).on_node * self.tensor
        ranks = self.tensor * self.pipeline * self.data
        same = apart < self.gpus_per_node and ranks <= self.gpus_per_node
        return Group(2, 2 if same else 1, min(self.gpus_per_node, first_stages))

    @property
    def senders(self) -> int:
        """How many ranks of a node send to the next stage on another node at the same time."""
        return min(self.gpus_per_node, self._stage_stride)

    @property
    def _replica_stride(self) -> int:
        return self.tensor * (self.pipeline if self.pipeline_first else 1)

    @property
    def _stage_stride(self) -> int:
        return self.tensor * (1 if self.pipeline_first else self.data)

    def _group(self, size: int, stride: int) -> Group:
        """Ranks that are a stride apart."""
        if size * stride <= self.gpus_per_node:
            return Group(size, size, 1)
        on_node = max(1, min(size - 1, self.gpus_per_node // stride))
        return Group(size, on_node, min(self.gpus_per_node, stride))

    def kinds(self) -> dict[tuple[bool, ...], int]:
        """Which edges of a replica's pipeline leave a node, with one replica of each kind.

        The last entry is the edge from the last stage back to the first.
        """
        found: dict[tuple[bool, ...], int] = {}
        for replica in range(min(self.data, self.gpus_per_node)):
            nodes = [
                (replica * self._replica_stride + stage * self._stage_stride) // self.gpus_per_node
                for stage in range(self.pipeline)
            ]
            following = [*nodes[1:], nodes[0]]
            crosses = tuple(one != two for one, two in zip(nodes, following, strict=True))
            found.setdefault(crosses, replica)
        return found


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
