"""Activations of several chunks: every operation of torch is done on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.models.chunked_tensor import ChunkedTensor, chunked
from axsparse.runtime.errors import ConfigError

CHUNKS = 3


def chunks() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 4, generator=generator).requires_grad_() for _ in range(CHUNKS)]


def flat(value: Any) -> list[Any]:
    """The tensors of a result, in order."""
    return [value] if isinstance(value, Tensor) else [each for one in value for each in flat(one)]


def in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.mul_(2)[..., 0] += 1
    y += x
    return y


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "views": lambda x: x.view(2, 5, -1, 2).transpose(1, 2)[:, None, ..., 1:].reshape(2, -1),
    "whole": lambda x: x * torch.ones(4) + 2 * (1 - x) / x.shape[-1],
    "several": lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1),
    "lists": lambda x: [torch.stack([x, x]), x.chunk(2, -1)],
    "iteration": list,
    "tuples": lambda x: x.max(dim=1).values,
    "keywords": lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "in place": in_place,
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
    "silu": lambda x: F.silu(x),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_each_chunk_alone(name: str) -> None:
    run, parts, alone = OPERATIONS[name], chunks(), chunks()

    results = flat(run(chunked(parts)))
    expected = [flat(run(chunk)) for chunk in alone]

    assert results
    for number in range(CHUNKS):
        for result, of_chunk in zip(results, expected[number], strict=True):
            assert isinstance(result, ChunkedTensor)
            assert torch.equal(result.chunks[number], of_chunk)
        sum(result.chunks[number].sum() for result in results).backward()
        sum(one.sum() for one in expected[number]).backward()
        assert torch.equal(parts[number].grad, alone[number].grad)  # type: ignore[arg-type]


def test_what_is_alike_is_that_of_a_chunk_and_one_chunk_is_a_plain_tensor() -> None:
    x, (first, *_) = chunked(chunks()), chunks()

    assert (x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device)
    assert (len(x), x.dim(), x.size(-1), x.requires_grad, x.is_contiguous()) == (
        2,
        3,
        4,
        True,
        True,
    )
    assert chunked([first]) is first


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x[0, 0, 0] > 0.5)]
)
def test_numbers_that_chunks_have_for_themselves_are_refused(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ConfigError, match="gives other numbers for each chunk between a column"):
        look(chunked([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)]))
