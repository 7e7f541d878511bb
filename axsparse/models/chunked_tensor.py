"""One tensor that stands for the activations of several chunks of a cut layer.

It is what a layer sees between a column and a row split (`tensor_parallel`) on a member that has
several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from axsparse.models.token_tensor import whole_in
from axsparse.runtime.errors import ConfigError


class ChunkedTensor(Tensor):
    """Activations of several chunks, one tensor for each, alike in shape.

    Every operation of torch is done for each chunk by itself. So each operation has the same
    operands at every degree; run once on the chunks joined, many operations would give other last
    bits. It has the shape of one chunk, and no memory of its own.
    """

    chunks: tuple[Tensor, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        args, kwargs = whole_in((args, kwargs or {}))
        [count] = {len(each.chunks) for each in _chunked_in((args, kwargs))}
        results = [func(*chunk_of(args, n), **chunk_of(kwargs, n)) for n in range(count)]
        return of_all_chunks(func, results)


def chunked(chunks: Sequence[Tensor]) -> Tensor:
    """The activations of a member's chunks as one tensor; of one chunk that chunk itself."""
    if len(chunks) == 1:
        return chunks[0]
    empty = torch.empty(chunks[0].shape, dtype=chunks[0].dtype, device="meta")
    together: ChunkedTensor = Tensor._make_subclass(ChunkedTensor, empty)
    together.chunks = tuple(chunks)
    return together


def _chunked_in(value: Any) -> Iterator[ChunkedTensor]:
    """All `ChunkedTensor` in the arguments of a function."""
    if isinstance(value, ChunkedTensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _chunked_in(each)


def chunk_of(value: Any, number: int) -> Any:
    """The arguments of a function for one chunk."""
    if isinstance(value, ChunkedTensor):
        return value.chunks[number]
    if isinstance(value, dict):
        return {name: chunk_of(each, number) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        found = [chunk_of(each, number) for each in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def of_all_chunks(func: object, results: Sequence[Any]) -> Any:
    """The result of a function that ran for each chunk: tensors are joined, also in tuples and
    lists. Other values have to be equal, ConfigError if not, since a forward may depend on them."""
    first = results[0]
    if isinstance(first, Tensor):
        return chunked(results)
    if isinstance(first, Iterator):
        return (of_all_chunks(func, each) for each in zip(*results, strict=True))
    if isinstance(first, (tuple, list)) and any(isinstance(each, Tensor) for each in first):
        return type(first)([of_all_chunks(func, each) for each in zip(*results, strict=True)])
    if isinstance(first, (bool, int, float, tuple, list)) and any(r != first for r in results):
        raise ConfigError(
            f"layout.g_tensor: {getattr(func, '__name__', func)} gives other numbers for each "
            "chunk between a column and a row split; gather what lies there (Split.gathered)"
        )
    return first
