"""Bytes of tensors, however these lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axsparse.runtime.tensor_bytes import bytes_of

COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]], dtype=torch.complex128)


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
def test_they_are_those_of_the_entries_in_order(tensor: Tensor) -> None:
    assert (
        bytes_of(tensor).numpy().tobytes()
        == torch.tensor(tensor.tolist(), dtype=tensor.dtype).numpy().tobytes()
    )


def test_what_lies_in_order_is_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3)

    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()
