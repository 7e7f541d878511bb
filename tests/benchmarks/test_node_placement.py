"""Who stands on which node, and with whom it shares the cards."""

from __future__ import annotations

import pytest
from published.node_placement import NodePlacement

from axsparse.planner.step_cost import Group


def megatron(data: int, tensor: int, pipeline: int) -> NodePlacement:
    return NodePlacement(data, tensor, pipeline, gpus_per_node=8, pipeline_first=False)


@pytest.mark.parametrize(
    ("placed", "said", "expected"),
    [
        # Four whole nodes a stage: one ring with eight members on each.
        (megatron(32, 1, 2), "data_group", Group(32, 8, 1)),
        (megatron(32, 1, 2), "senders", 8),
        (megatron(4, 4, 2), "tensor_group", Group(4, 4, 1)),
        # Rings of replicas share a node's cards behind tensor groups.
        (megatron(4, 4, 2), "data_group", Group(4, 2, 4)),
        (megatron(1, 1, 16), "senders", 1),
        (NodePlacement(64, 1, 4, 6, pipeline_first=True), "data_group", Group(64, 1, 4)),
        (megatron(1, 16, 1), "tensor_group", Group(16, 8, 1)),
        # First and last stage share the cards with those of other replicas.
        (megatron(1, 1, 16), "ends", Group(2, 1, 1)),
        (megatron(8, 1, 4), "ends", Group(2, 1, 8)),
        (megatron(1, 1, 8), "ends", Group(2, 2, 1)),
    ],
    ids=str,
)
def test_groups_stand_on_nodes(placed: NodePlacement, said: str, expected: object) -> None:
    assert getattr(placed, said) == expected


@pytest.mark.parametrize(
    ("placed", "crossing"),
    [
        (megatron(32, 1, 2), [[0, 1]]),
        # A pipeline of neighbours leaves the node at its border only.
        (megatron(1, 1, 16), [[7, 15]]),
        # Six devices a node and four stages: the border falls after the second stage of some.
        (NodePlacement(64, 1, 4, 6, pipeline_first=True), [[], [1, 3]]),
    ],
    ids=str,
)
def test_some_edges_of_a_pipeline_leave_the_node(
    placed: NodePlacement, crossing: list[list[int]]
) -> None:
    found = [[stage for stage, out in enumerate(kind) if out] for kind in placed.kinds()]

    assert found == crossing
