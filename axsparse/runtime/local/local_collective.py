"""A `Collective` between ranks of a `LocalWorld`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from axsparse.runtime.communication import Op, shard_bounds
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.rank_order import exchanged_bytes, store_sum_in_rank_order


@dataclass
class _Post:
    """One member's part in an operation, and its `Work`."""

    op: Op
    buffer: Tensor
    bounds: list[int]
    done: bool = False

    def poll(self) -> bool:
        return self.done


class LocalCollective:
    """A group whose last member to start an operation carries it out for all."""

    def __init__(
        self, world: LocalWorld[Any], name: str, ranks: tuple[int, ...], world_rank: int
    ) -> None:
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)
        self.bytes_sent = 0
        self._world = world
        self._group = world.group(name, ranks)
        self._number = 0

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> _Post:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        assert len(limits) == self.size + 1 and limits[0] == 0 and limits[-1] == buffer.numel()
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        posted = _Post(op, buffer, limits)
        members = self._group.posted.setdefault(self._number, {})
        members[self.rank] = posted
        if len(members) == self.size:
            del self._group.posted[self._number]
            _carry_out([members[rank] for rank in range(self.size)])
            self._world.progress()
        self._number += 1
        return posted


def _carry_out(members: list[_Post]) -> None:
    """Work on the buffers of all members, which are in rank order."""
    op, bounds = members[0].op, members[0].bounds
    assert all((m.op, m.bounds) == (op, bounds) for m in members), "members disagree on the op"
    buffers = [member.buffer for member in members]
    first, *others = buffers
    shards = [slice(*pair) for pair in itertools.pairwise(bounds[1:])]
    # The first buffer gets the whole result, which the others take from it: as many operations
    # as there are members, where shard by shard for each member would be their square.
    if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        store_sum_in_rank_order(buffers, first)
    elif op is Op.ALL_GATHER:
        for own, shard in zip(others, shards, strict=True):
            first[shard] = own[shard]
    for own, shard in zip(others, shards, strict=True):
        part = shard if op is Op.REDUCE_SCATTER else slice(None)
        own[part] = first[part]
    for member in members:
        member.done = True
