"""The transport of ranks that are threads of one process, with its links and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from axsparse.runtime.communication import (
    Backoff,
    Collective,
    Direction,
    Link,
    Message,
    Op,
    shard_bounds,
)
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.local.local_world import LocalWorld, TurnBackoff
from axsparse.runtime.process import exit_process
from axsparse.runtime.rank_order import exchanged_bytes, store_sum_in_rank_order

Local = TypeVar("Local", bound="LocalTransport")
MOST_UNSEEN = 5
"""The most looks at which a finished operation of a group still seems to be under way."""


class LocalTransport:
    """One rank of a `LocalWorld`; in a world of one rank, a run in one process without MPI."""

    name = "local"

    def __init__(self, world: LocalWorld[Any], rank: int, backoff: Backoff | None = None) -> None:
        """`backoff` is how this rank waits, by default until another rank has had its turn."""
        self.rank = rank
        self.size = world.size
        self.backoff: Backoff = backoff or TurnBackoff(world, rank)
        self._local = world
        self.world: Collective = self.collective("world", range(world.size))

    def link(self, coords: RankCoords) -> Link:
        return LocalLink(self._local, coords)

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return LocalCollective(self._local, name, tuple(ranks), self.rank)

    def branch(self: Local) -> Local:
        return self  # a branch would have nothing separate to close

    def abort(self, code: int) -> NoReturn:
        exit_process(code)

    def close(self) -> None:
        """Do nothing, since nothing is held."""


class LocalLink:
    """Puts copies of tensors into the neighbour's mailbox.

    In a world with a seed each call of `arrivals` shows a random part of what has come. The order
    between the two directions is random, that within a direction never.
    """

    def __init__(self, world: LocalWorld[Any], coords: RankCoords) -> None:
        self.bytes_sent = 0
        self._world = world
        self._coords = coords
        self._inboxes = []
        if not coords.is_first:
            before = coords.neighbour(-1)
            self._inboxes.append(world.mailbox(before, coords.rank, Direction.FORWARD.name))
        if not coords.is_last:
            after = coords.neighbour(1)
            self._inboxes.append(world.mailbox(after, coords.rank, Direction.BACKWARD.name))

    def send(self, message: Message) -> None:
        direction = message.direction
        forward = direction is Direction.FORWARD
        assert not (self._coords.is_last if forward else self._coords.is_first), "no such neighbour"
        copies = tuple(
            # Tensors that come over a channel are contiguous, so these are too.
            None if t is None else t.detach().clone(memory_format=torch.contiguous_format)
            for t in message.tensors
        )
        self.bytes_sent += sum(tensor.nbytes for tensor in copies if tensor is not None)
        target = self._coords.neighbour(1 if forward else -1)
        mailbox = self._world.mailbox(self._coords.rank, target, direction.name)
        mailbox.append(replace(message, tensors=copies))
        self._world.progress()

    def arrivals(self) -> list[Message]:
        messages: list[Message] = []
        random = self._world.random
        inboxes = list(self._inboxes)
        if random is not None:
            random.shuffle(inboxes)
        for inbox in inboxes:
            while inbox and (random is None or random.random() < 0.5):
                self._world.progress()
                messages.append(inbox.popleft())
        return messages

    def push(self) -> None:
        """Do nothing, since nothing waits to be sent."""

    @property
    def unsent(self) -> int:
        """Zero, since `send` copies at once."""
        return 0

    def close(self) -> None:
        """Do nothing, since nothing is held."""


@dataclass
class _Post:
    """One rank's part in an operation, and its `Work`."""

    op: Op
    buffer: Tensor
    bounds: list[int]
    unseen: int = 0
    """At how many looks it still seems to be under way once it is done."""
    done: bool = False

    def poll(self) -> bool:
        if self.done and self.unseen:
            self.unseen -= 1
            return False
        return self.done


class LocalCollective:
    """A group whose last rank to start an operation carries it out for all.

    In a world with a seed each rank sees the end of an operation after a random number of looks.
    """

    def __init__(
        self, world: LocalWorld[Any], name: str, ranks: tuple[int, ...], world_rank: int
    ) -> None:
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)
        self.bytes_sent = 0
        self._world = world
        self._posted = world.group(name, ranks)
        self._number = 0

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> _Post:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        assert len(limits) == self.size + 1 and limits[0] == 0 and limits[-1] == buffer.numel()
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        random = self._world.random
        unseen = 0 if random is None else random.randrange(MOST_UNSEEN + 1)
        posted = _Post(op, buffer, limits, unseen)
        members = self._posted.setdefault(self._number, {})
        members[self.rank] = posted
        if len(members) == self.size:
            del self._posted[self._number]
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
    # The first buffer gets the full result, and the others copy it: N operations for N ranks, where
    # shard by shard for each rank would be N².
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
