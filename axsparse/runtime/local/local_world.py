"""Ranks as threads of one process that take turns: no ports, no races, repeatable.

One rank runs at a time and hands the turn on when it would wait. A seed, if there is one, draws
who runs next, which of the arrived messages a rank sees first, and when a rank sees that an
operation of a group is over, so that a test can walk through many orders of arrival.
"""

from __future__ import annotations

import bisect
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axsparse.runtime.seeds import kept_rng

T = TypeVar("T")
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
        self._mail: dict[tuple[int, int, str], deque[Any]] = {}
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

    def mailbox(self, source: int, target: int, channel: str) -> deque[Any]:
        """The queue of messages from one rank to another."""
        return self._mail.setdefault((source, target, channel), deque())

    def group(self, name: str, ranks: tuple[int, ...]) -> Posted:
        """The operations that the members of the group of this name and these ranks share."""
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
