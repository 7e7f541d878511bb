"""A `Link` between ranks of a `LocalWorld`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from axsparse.runtime.communication import Direction, Message
from axsparse.runtime.grid import Place
from axsparse.runtime.local.local_world import LocalWorld


class LocalLink:
    """Puts copies of tensors into the neighbour's mailbox.

    In a world with a seed each call of `arrivals` shows a random part of what has come. The order
    between the two directions is random, that within a direction never.
    """

    def __init__(self, world: LocalWorld[Any], place: Place) -> None:
        self.bytes_sent = 0
        self._world = world
        self._place = place
        rank = place.rank
        self._inboxes = []
        if not place.is_first:
            self._inboxes.append(world.mailbox(rank - 1, rank, Direction.FORWARD.name))
        if not place.is_last:
            self._inboxes.append(world.mailbox(rank + 1, rank, Direction.BACKWARD.name))

    def send(self, message: Message) -> None:
        direction = message.direction
        forward = direction is Direction.FORWARD
        assert not (self._place.is_last if forward else self._place.is_first), "no such neighbour"
        copies = tuple(
            # Tensors that come over a channel are contiguous, so these are too.
            None if t is None else t.detach().clone(memory_format=torch.contiguous_format)
            for t in message.tensors
        )
        self.bytes_sent += sum(tensor.nbytes for tensor in copies if tensor is not None)
        target = self._place.rank + (1 if forward else -1)
        mailbox = self._world.mailbox(self._place.rank, target, direction.name)
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
