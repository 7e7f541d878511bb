"""The part of a tensor that one tensor-parallel rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from axsparse.models.layer import Layer


@dataclass(frozen=True)
class TensorShard:
    """The place of a shard in the full tensor: one of `count` consecutive parts of a dimension."""

    full_shape: tuple[int, ...]
    dim: int
    index: int
    count: int
    packed: int = 1
    """How many matrices stand one above the other in the dimension; each of them is sharded."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds of the shard in each packed matrix."""
        size = self.full_shape[self.dim] // self.packed
        return self.index * size // self.count, (self.index + 1) * size // self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        before, after = self._around
        start, stop = self.bounds
        return (*before, self.packed * (stop - start), *after)

    @property
    def numel(self) -> int:
        """The number of entries of the shard."""
        return math.prod(self.shape)

    @property
    def full_numel(self) -> int:
        """The number of entries of the full tensor."""
        return math.prod(self.full_shape)

    def of_rank(self, index: int) -> TensorShard:
        """The shard that another rank holds."""
        return TensorShard(self.full_shape, self.dim, index, self.count, self.packed)

    def take(self, full: Tensor) -> Tensor:
        """The shard of the full tensor, which may be flat; contiguous."""
        before, after = self._around
        start, stop = self.bounds
        grouped = full.reshape(*before, self.packed, -1, *after)
        part = grouped.narrow(self.dim + 1, start, stop - start)
        return part.reshape(self.shape).contiguous()

    def assemble(self, flat: Tensor) -> Tensor:
        """The full tensor, from the shards of all ranks one after the other."""
        before, after = self._around
        if self.packed == 1 and math.prod(before) == 1:
            return flat.view(self.full_shape)
        shards = [self.of_rank(index) for index in range(self.count)]
        parts = flat.split([shard.numel for shard in shards])
        grouped = [part.view(*before, self.packed, -1, *after) for part in parts]
        return torch.cat(grouped, self.dim + 1).view(self.full_shape)

    @property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the dimensions before and after the sharded one."""
        return self.full_shape[: self.dim], self.full_shape[self.dim + 1 :]


class ShardGroup(Protocol):
    """The ranks that hold the shards of the same tensors; all of them call each method together."""

    @property
    def rank(self) -> int:
        """The index of this rank's shards."""
        ...

    def gather(self, shard: TensorShard, part: Tensor) -> Tensor:
        """The full tensor, from the shard of this rank, which may be flat."""
        ...

    def gather_rows(self, row: Tensor) -> Tensor:
        """The flat tensors of all ranks, alike in size, as the rows of a matrix."""
        ...


class LayerSharding(Protocol):
    """How the layers of one stage are sharded over tensor-parallel ranks."""

    @property
    def group(self) -> ShardGroup:
        """The ranks that have the shards."""
        ...

    def shard(self, layer: Layer, module: nn.Module) -> Mapping[str, TensorShard]:
        """Replace the sharded parameters of a layer's module by this rank's shards, which have no
        contents yet; returns the shards by the names of the parameters, which stay."""
        ...
