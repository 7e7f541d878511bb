"""The form of tensors at the borders between layers: a copy only where memory differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axsparse.runtime.canonical_form import ALIGNMENT, canonical

BASE = torch.arange(64.0).view(2, 2, 4, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE.transpose(1, 2),
        BASE[..., ::2],
        BASE[:, 1:],
        BASE[1:, 1, 1:2],
        BASE[:1, :1, 0, 0].expand(3, 5),
        BASE.to(memory_format=torch.channels_last),
        BASE[:, :1].to(memory_format=torch.channels_last),
        BASE[:, :, :1, :1],
        BASE.flatten()[3:],
        BASE[:0, ::2],
        torch._neg_view(BASE),
        torch.complex(BASE, BASE).conj().imag,
        torch.arange(64)[1:],
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_everything_else_is_as_if_it_had_travelled(tensor: Tensor) -> None:
    found = canonical(tensor)

    assert torch.equal(found, tensor)
    assert found.stride() == torch.empty(tensor.shape).stride()
    assert found.data_ptr() % ALIGNMENT == 0
    assert not found.is_neg()
    assert canonical(found) is found


def test_strides_of_one_element_are_set_right_without_a_copy() -> None:
    odd = torch.ones(5, 7, 1).transpose(1, 2)

    assert odd.stride() != torch.empty(odd.shape).stride()
    assert canonical(odd).data_ptr() == odd.data_ptr()


def test_gradients_pass_through() -> None:
    base = torch.arange(6.0, requires_grad=True)

    (canonical(base.view(2, 3).t()) * torch.arange(6.0).view(3, 2)).sum().backward()

    assert base.grad is not None
    assert base.grad.tolist() == [0, 2, 4, 1, 3, 5]
