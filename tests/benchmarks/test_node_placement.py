"""Who stands on which node, and with whom it shares the cards."""

from __future__ import annotations

from published.node_placement import NodePlacement

from axsparse.planner.step_cost import Group


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
