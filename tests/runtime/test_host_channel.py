"""Between which ranks channels go, and the bytes of tensors, cut for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Direction
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import Direct, neighbours

COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]], dtype=torch.complex128)


def test_every_pair_of_neighbours_has_a_channel_each_way() -> None:
    grid = Grid(3, 2)
    channels = {
        direction: sorted(
            {ends for rank in range(grid.size) for ends in neighbours(grid.coords(rank), direction)}
        )
        for direction in Direction
    }

    assert channels[Direction.FORWARD] == [(0, 1), (1, 2), (3, 4), (4, 5)]
    assert channels[Direction.BACKWARD] == [(1, 0), (2, 1), (4, 3), (5, 4)]


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.ones(1), [4]),
        (torch.arange(5.0), [8, 8, 4]),
        (torch.arange(4.0), [8, 8]),
        (torch.tensor(2.5).expand(1), [4]),
    ],
)
def test_no_call_carries_more_than_its_limit(tensor: Tensor, wanted: list[int]) -> None:
    pieces: list[Tensor] = []
    channel: Any = SimpleNamespace(send=pieces.append)

    Direct(channel, 8).send([tensor])

    assert [piece.numel() for piece in pieces] == wanted
    assert b"".join(piece.numpy().tobytes() for piece in pieces) == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.arange(6)[::2],
        torch.tensor([2.0]).expand(4),
        torch.tensor(2.0).expand(1),
        torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
    ],
)
def test_bytes_are_those_of_the_entries_in_order(tensor: Tensor) -> None:
    assert (
        bytes_of(tensor).numpy().tobytes()
        == torch.tensor(tensor.tolist(), dtype=tensor.dtype).numpy().tobytes()
    )


def test_what_lies_in_order_is_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3)

    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()
