"""Between which ranks wires go, and how contents are cut for them."""

from __future__ import annotations

import pytest
import torch

from axsparse.runtime.communication import Direction
from axsparse.runtime.grid import Grid
from axsparse.runtime.wire import byte_pieces, neighbours


def test_every_pair_of_neighbours_has_an_edge_each_way() -> None:
    grid = Grid(3, 2)
    edges = {
        direction: sorted(
            {edge for rank in range(grid.size) for edge in neighbours(grid.place(rank), direction)}
        )
        for direction in Direction
    }

    assert edges[Direction.FORWARD] == [(0, 1), (1, 2), (3, 4), (4, 5)]
    assert edges[Direction.BACKWARD] == [(1, 0), (2, 1), (4, 3), (5, 4)]


@pytest.mark.parametrize(("size", "wanted"), [(0, []), (1, [4]), (5, [8, 8, 4]), (4, [8, 8])])
def test_no_call_carries_more_than_its_limit(size: int, wanted: list[int]) -> None:
    tensor = torch.arange(float(size))

    pieces = byte_pieces(tensor, 8)

    assert [piece.numel() for piece in pieces] == wanted
    assert b"".join(piece.numpy().tobytes() for piece in pieces) == tensor.numpy().tobytes()


def test_the_one_entry_of_an_expanded_tensor_travels() -> None:
    tensor = torch.tensor(2.5).expand(1)

    assert byte_pieces(tensor, 8)[0].numpy().tobytes() == tensor.numpy().tobytes()
