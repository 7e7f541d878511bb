"""Has the ranks of a stage run the same actions in the same order.

Arrivals differ between ranks, but the sums within the layers of tensor-parallel ranks must meet,
and so must the gathers of weights that replicas share. So the first rank asks its policy and
broadcasts each action as it begins it; the others follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axsparse.runtime.communication import (
    Backoff,
    Collective,
    Direction,
    Link,
    Message,
    Op,
    Work,
    wait,
)
from axsparse.tensor_parallel.group import TensorGroup


class ActionBroadcast:
    """Broadcasts whole numbers from the first rank of a group to the others, in order."""

    def __init__(self, ranks: Collective, backoff: Backoff, *, on_gpus: bool) -> None:
        """`ranks` is used for nothing else. They compute `on_gpus` or on CPUs."""
        self.rank, self._ranks = ranks.rank, ranks
        self._backoff, self._on_gpus = backoff, on_gpus
        self._sending: list[Work] = []
        self._receiving: tuple[Tensor, Work] | None = None

    def broadcast(self, words: Sequence[int]) -> None:
        """Send numbers to the others, from rank 0; on GPUs they have left when this returns."""
        self._sending = [work for work in self._sending if not work.poll()]
        self._sending.append(self._ranks.start(Op.BROADCAST, torch.tensor(words)))
        if self._on_gpus:
            wait(self._sending[-1], self._backoff)

    def next_broadcast(self, count: int) -> list[int] | None:
        """The next numbers, this many, that rank 0 sends, or None if they have not come yet."""
        if self._receiving is None:
            words = torch.zeros(count, dtype=torch.int64)
            self._receiving = words, self._ranks.start(Op.BROADCAST, words)
        words, work = self._receiving
        if not work.poll():
            return None
        self._receiving = None
        found: list[int] = words.tolist()
        return found


class Lockstep:
    """A policy around a policy: the first rank decides, the others follow.

    A follower runs the actions in the order of the broadcasts, each as soon as its input has
    arrived here too. That input is certain to come: the first rank had its own, and the ranks of
    the stage before run the same actions.
    """

    def __init__(
        self, group: ActionBroadcast, make: Callable[[int, int], Any], policy: Any
    ) -> None:
        """`policy` is one of `pipeline/policy.py`; `make(kind, microbatch)` makes its actions."""
        self._policy, self._group, self._make = policy, group, make
        self.expects = policy.expects
        self._here = dict.fromkeys(Direction, 0)
        self._due: Any = None
        """The action that was broadcast and has not begun here."""
        self._is_last = False
        """Whether no further action follows that one."""

    @property
    def finished(self) -> bool:
        return bool(self._policy.finished) or (self._is_last and self._due is None)

    def arrived(self, direction: Direction, microbatch: int) -> None:
        self._policy.arrived(direction, microbatch)
        self._here[direction] += 1

    def next(self) -> Any:
        if self._group.rank == 0:
            action = self._policy.next()
            if action is not None:
                self._group.broadcast((action.kind, action.microbatch, self._policy.finished))
            return action
        if self._due is None and (words := self._group.next_broadcast(3)) is not None:
            kind, microbatch, is_last = words
            self._due, self._is_last = self._make(kind, microbatch), bool(is_last)
        if self._due is None or not self._has_input(self._due):
            return None
        begun, self._due = self._due, None
        return begun

    def _has_input(self, action: Any) -> bool:
        """Whether the input of an action, if it needs a message, is here."""
        here = self._here.get(action.kind)
        return here is None or not self._policy.expects(action.kind) or action.microbatch < here


class MeetingLink:
    """A link whose messages arrive once they have come to all tensor-parallel ranks of the stage.

    On GPUs each action begins after that. Its sums then wait for nothing but ranks that are about
    to begin them, so that compute may wait there in place of a host that sends messages, and a host
    that waits for compute holds up nobody for good.
    """

    def __init__(self, link: Link, group: TensorGroup) -> None:
        self._link, self._group = link, group
        self.send, self.push, self.close = link.send, link.push, link.close
        self._arrived: dict[Direction, deque[tuple[Message, Work]]]
        self._arrived = {direction: deque() for direction in Direction}

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    @property
    def unsent(self) -> int:
        return self._link.unsent

    def arrivals(self) -> list[Message]:
        """The messages that have come to all ranks by now."""
        for message in self._link.arrivals():
            work = self._group.arrived(message.direction)
            self._arrived[message.direction].append((message, work))
        found = []
        for works in self._arrived.values():
            while works and works[0][1].poll():
                found.append(works.popleft()[0])
        return found
