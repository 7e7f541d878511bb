"""A transport of ranks that are threads of this process and take turns: no ports, no races.

One rank runs at a time and hands the turn on when it would wait. A seed, if there is one, draws
who runs next, which of the arrived messages a rank sees first, and when a rank sees that an
operation of a group is over, so that a test can walk through many orders of arrival.
"""

from __future__ import annotations

import bisect
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
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
from axsparse.runtime.exchange import exchanged_bytes, store_sum_in_rank_order
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.host_channel import neighbours
from axsparse.runtime.process import exit_process
from axsparse.runtime.seeds import preserved_rng

T = TypeVar("T")
_NUMPY: Any = np.random
_FIRST = _NUMPY.get_bit_generator()
IDLE_TURNS = 2_000
"""How many turns without progress, on average over the ranks, are taken for a deadlock."""


class DeadlockError(AssertionError):
    """All ranks wait and nothing is under way."""


class _AbandonedError(BaseException):
    """Ends a rank that waits after another one failed; no handler of `Exception` keeps it."""


Posted = dict[int, dict[int, Any]]
"""The parts of a group's members in each operation, by the operation's number and the member's."""


class LocalWorld(Generic[T]):
    """`size` ranks in this process."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        """With a `seed` turns and arrivals are drawn at random; with None ranks take turns in
        order and see messages as they come."""
        self.size = size
        self.random = None if seed is None else random.Random(seed)  # noqa: S311 - test order
        self._mail: dict[tuple[int, int, Direction], deque[Any]] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], Posted] = {}
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._alive = list(range(size))
        self._finished = threading.Event()
        self._failure: BaseException | None = None
        self._idle = 0
        self._time = 0

    def run(self, main: Callable[[int], T]) -> list[T]:
        """Run `main(rank)` on every rank; returns all results, or raises the first failure."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = main(rank)
            except _AbandonedError:
                pass
            except BaseException as failure:
                self._failure = self._failure or failure
            finally:
                self._leave(rank)

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        self._finished.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def mailbox(self, source: int, target: int, channel: Direction) -> deque[Any]:
        return self._mail.setdefault((source, target, channel), deque())

    def group(self, name: str, ranks: tuple[int, ...]) -> Posted:
        return self._groups.setdefault((name, ranks), {})

    def progress(self) -> None:
        """Note that something moved, so that this is no deadlock."""
        self._idle = 0

    def pass_turn(self, rank: int) -> None:
        """Let another rank run; returns when it is this rank's turn again."""
        self._idle += 1
        if self._idle > IDLE_TURNS * self.size:
            raise DeadlockError(f"rank {rank} waits, and so do all {len(self._alive)} others")
        following = self._next_after(rank)
        if following != rank:
            with kept_rng():
                self._turns[following].release()
                self._turns[rank].acquire()
        if self._failure is not None:
            raise _AbandonedError

    def _next_after(self, rank: int) -> int:
        if self.random is not None:
            return self.random.choice(self._alive)
        return self._alive[bisect.bisect(self._alive, rank) % len(self._alive)]

    def _leave(self, rank: int) -> None:
        self.progress()
        self._alive.remove(rank)
        if self._alive:
            self._turns[self._next_after(rank)].release()
        else:
            self._finished.set()


@contextmanager
def kept_rng() -> Iterator[None]:
    """Let other ranks draw from the global generators and replace them, and continue afterwards as
    if none had."""
    of_numpy = _NUMPY.get_bit_generator()
    state = of_numpy.state
    try:
        with preserved_rng(is_seeded=True):
            # A rank that replaces the generator may put the one that it finds back much later.
            _NUMPY.set_bit_generator(_FIRST)
            yield
    finally:
        of_numpy.state = state


class TurnBackoff:
    """Waits by handing the turn to another rank."""

    def __init__(self, world: LocalWorld[Any], rank: int) -> None:
        self.pauses = 0
        self._world = world
        self._rank = rank

    def pause(self) -> None:
        self.pauses += 1
        self._world.pass_turn(self._rank)

    def reset(self) -> None:
        """Do nothing, since all pauses are alike."""


Own = TypeVar("Own", bound="WorldTransport")
MOST_UNSEEN = 5
"""The most looks at which a finished operation of a group still seems to be under way."""


class WorldTransport:
    """One rank of a `LocalWorld`."""

    name = "local"

    def __init__(self, world: LocalWorld[Any], rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.backoff: Backoff = TurnBackoff(world, rank)
        self._local = world
        self.world: Collective = self.collective("world", range(world.size))

    def link(self, coords: RankCoords) -> Link:
        return WorldLink(self._local, coords)

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return WorldCollective(self._local, name, tuple(ranks), self.rank)

    def branch(self: Own) -> Own:
        return self  # a branch would have nothing separate to close

    def abort(self, code: int) -> NoReturn:
        exit_process(code)

    def close(self) -> None:
        """Do nothing, since nothing is held."""


class WorldLink:
    """Puts copies of tensors into the neighbour's mailbox.

    In a world with a seed each call of `arrivals` shows a random part of what has come. The order
    between the two directions is random, that within a direction never.
    """

    def __init__(self, world: LocalWorld[Any], coords: RankCoords) -> None:
        self.bytes_sent = 0
        self._world = world
        ends = [(*e, direction) for direction in Direction for e in neighbours(coords, direction)]
        self._inboxes = [world.mailbox(*end) for end in ends if end[1] == coords.rank]
        self._outboxes = {end[2]: world.mailbox(*end) for end in ends if end[0] == coords.rank}

    def send(self, message: Message) -> None:
        assert message.direction in self._outboxes, "no such neighbour"
        copies = tuple(
            # Tensors that come over a channel are contiguous, so these are too.
            None if t is None else t.detach().clone(memory_format=torch.contiguous_format)
            for t in message.tensors
        )
        self.bytes_sent += sum(tensor.nbytes for tensor in copies if tensor is not None)
        self._outboxes[message.direction].append(replace(message, tensors=copies))
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


class WorldCollective:
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
