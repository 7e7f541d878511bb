"""The `Link` for tensors in GPU memory, and the protocols of what carries their contents.

A message crosses from one stage to the next in two parts. Its *header* travels over a channel
between the hosts (`runtime/host_channel.py`, over MPI). Its contents travel from a `Sender` to a
`Receiver`, of which `transfers.py` has two kinds:

- NCCL's: straight from GPU to GPU over a *peer connection*, which goes one way.
- staged: through pinned memory of both hosts and over the channel between them.

Work of a GPU is enqueued on *streams*, CUDA's queues, and *events* tell when it is complete.
`device_protocol.py` describes peer connections, streams and devices. The tests replace these and
the channels by stand-ins, and run the link without a GPU.

A header is sent once its tensors are ready and everything before it has been sent. A send that
would wait on the GPU for its receiver starts once its header has left, and the receiver asks for
contents only once their header is there. So no GPU waits in a receive through the whole forward of
its neighbour. Headers and contents each arrive in the order of sending, so no message needs a
number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Direction, Event, Message
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.host_channel import (
    QUIET_PASSES,
    Header,
    HostChannel,
    contents,
    decode_header,
    dense,
    encode_header,
)

END = -1
"""Replaces the microbatch number in the last header of a link, which closes the link."""


class PendingSend(Event, Protocol):
    """The sending of a message's contents; complete once the sender no longer needs the tensors."""

    def begun(self) -> bool:
        """Whether the contents are ready and the next to be sent, so that the header may go."""
        ...

    def header_left(self) -> None:
        """Learn that the header is on its way, so that contents may wait for their receiver."""
        ...


class Sender(Protocol):
    """Sends the contents of messages in order; no call waits."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> PendingSend:
        """Start sending contiguous tensors, none of them empty, once `ready` is complete."""
        ...

    def advance(self) -> None:
        """Do the host's part of messages under way."""
        ...


class Receiver(Protocol):
    """Receives the contents of messages in order; no call waits."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in GPU memory to receive into."""
        ...

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        """Start receiving the contents of a message whose header has arrived."""
        ...

    def advance(self) -> None:
        """Do the host's part of messages under way."""
        ...


@dataclass
class _OutgoingMessage:
    """A message on its way out, which keeps its tensors alive."""

    message: Message
    header: Header
    pending: PendingSend
    header_sent: Event | None = None
    """None until the header is sent."""

    def query(self) -> bool:
        """Whether header and contents have been sent."""
        return self.header_sent is not None and self.header_sent.query() and self.pending.query()


@dataclass
class _IncomingMessage:
    """A message whose header has arrived."""

    message: Message
    arrival: Event


class GpuLink:
    """The link of one rank to the neighbouring stages of its replica; only `close` waits."""

    def __init__(
        self,
        outgoing: Mapping[Direction, tuple[HostChannel, Sender]],
        incoming: Mapping[Direction, tuple[HostChannel, Receiver]],
        device: Device,
        backoff: Backoff,
    ) -> None:
        """`outgoing` and `incoming` have the directions in which there is a neighbour."""
        self.bytes_sent = 0
        self._outgoing = dict(outgoing)
        self._incoming = dict(incoming)
        self._device = device
        self._backoff = backoff
        self._sending: dict[Direction, deque[_OutgoingMessage]] = {d: deque() for d in outgoing}
        self._receiving: dict[Direction, deque[_IncomingMessage]] = {d: deque() for d in incoming}
        self._ended: set[Direction] = set()

    def send(self, message: Message) -> None:
        direction = message.direction
        assert direction in self._outgoing, "no such neighbour"
        message = dense(message)
        header = encode_header(message)
        tensors = contents(message)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        # The event comes after `dense`, which may enqueue a copy.
        ready = self._device.compute.record()
        _, sender = self._outgoing[direction]
        pending = sender.send(tensors, ready)
        self._sending[direction].append(_OutgoingMessage(message, header, pending))
        self.push()

    def arrivals(self) -> list[Message]:
        messages: list[Message] = []
        quiet = 0
        while quiet < QUIET_PASSES:
            self.push()
            quiet = 0 if self._collect(messages) else quiet + 1
        return messages

    @property
    def unsent(self) -> int:
        return sum(map(len, self._sending.values()))

    def close(self) -> None:
        """Wait for the sends, and drop arrivals until the neighbours close, too."""
        self._backoff.reset()
        while self.unsent:
            self.push()
            self._collect([])
            self._backoff.pause()
        ends = [
            channel.send_header(np.array([END], dtype=np.int64))
            for channel, _ in self._outgoing.values()
        ]
        while (
            self._ended != set(self._incoming)
            or any(self._receiving.values())
            or not all(end.query() for end in ends)
        ):
            self._collect([])
            self._backoff.pause()

    def push(self) -> None:
        """Send the headers that may go, and let go of messages that have been sent.

        `arrivals` does this too. A rank that waits for something else has to call it, since the
        neighbour may need a message before it can do what the rank waits for.
        """
        for direction, (channel, sender) in self._outgoing.items():
            sending = self._sending[direction]
            # Memory is let go before the next contents are sent, since torch reuses it only after
            # all that NCCL's stream has been given by then.
            while sending and sending[0].query():
                sending.popleft()
            sender.advance()
            for one in sending:
                if one.header_sent is None:
                    if not one.pending.begun():
                        break
                    one.header_sent = channel.send_header(one.header)
                if one.header_sent.query():
                    one.pending.header_left()

    def _collect(self, messages: list[Message]) -> bool:
        """Look at both directions once, add complete messages, and say if anything moved."""
        moved = False
        for direction, (channel, receiver) in self._incoming.items():
            while (header := channel.receive_header()) is not None:
                moved = True
                if header[0] == END:
                    self._ended.add(direction)
                    continue
                message = decode_header(header, direction, receiver.empty)
                arrival = receiver.receive(contents(message))
                self._receiving[direction].append(_IncomingMessage(message, arrival))
            receiver.advance()
            receiving = self._receiving[direction]
            while receiving and receiving[0].arrival.query():
                messages.append(receiving.popleft().message)
                moved = True
        return moved
