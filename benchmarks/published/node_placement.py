"""Where the ranks of a published run stand, and which of them share the cards of a node."""

from __future__ import annotations

from dataclasses import dataclass

from axsparse.planner.step_cost import Group, group


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
        return group(self.tensor, 1, self.gpus_per_node)

    @property
    def data_group(self) -> Group:
        """The replicas of a stage."""
        return group(self.data, self._replica_stride, self.gpus_per_node)

    @property
    def ends(self) -> Group:
        """The first and the last stage of a replica, which sum a tied weight's gradients."""
        apart = (self.pipeline - 1) * self._stage_stride
        first_stages = self.data_group.on_node * self.tensor
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
