"""The `Link` for tensors in GPU memory, and what a message passes through on its way.

A message crosses from one stage to the next in two parts. Its *header* travels between the
hosts over a *wire* (`runtime/wire.py`, over MPI). Its contents travel from a `Sender` to a
`Receiver`, the two ends of a *lane*. There are three lanes:

- NCCL's (`nccl_lane.py`): straight from GPU to GPU over an *edge*, a one-way connection.
- staged (`staged_lane.py`): through pinned memory of both hosts and over the wire between them.
- direct (likewise): over the wire from GPU memory, for an MPI library that can read it.

What a GPU does is enqueued on *streams*, CUDA's queues, and its end is asked after through
*events*. `device_protocol.py` describes edges, streams and devices. The tests replace these
and the wires by stand-ins, and run the link and its lanes without a GPU.

A header is sent once its tensors are ready and all that was sent before is through. Contents that
wait on the GPU for their receiver follow once their header has left. The receiver asks for
contents only once their header is there. Both sequences are first in, first out, so
that no message needs a number on the way, and no GPU waits in a receive through the whole
forward of its neighbour.
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
from axsparse.runtime.message_header import Header, contents, decode_header, dense, encode_header
from axsparse.runtime.wire import QUIET_PASSES, Wire

END = -1
"""Stands in the place of the microbatch in the last header of a link, which closes it."""


class Departure(Event, Protocol):
    """A message's contents on their way out; complete once the lane needs the tensors no more."""

    def begun(self) -> bool:
        """Whether the contents are ready and next in their queue, so that the header may go."""
        ...

    def header_left(self) -> None:
        """Learn that the header is on its way, so that contents may wait for their receiver. It is
        told again and again."""
        ...


class Sender(Protocol):
    """The sending end of a lane, first in, first out; no call waits."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Departure:
        """Start sending contiguous tensors, none of them empty, once `ready` is complete."""
        ...

    def advance(self) -> None:
        """Move on what waits for the host."""
        ...


class Receiver(Protocol):
    """The receiving end of a lane, first in, first out; no call waits."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in GPU memory to receive into."""
        ...

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        """Start receiving the contents of one message, whose header is here already."""
        ...

    def advance(self) -> None:
        """Move on what waits for the host."""
        ...


@dataclass
class _OutgoingMessage:
    """A message on its way out, which keeps its tensors alive."""

    message: Message
    header: Header
    departure: Departure
    header_sent: Event | None = None
    """None as long as the header may not go yet."""

    def query(self) -> bool:
        """Whether header and contents are through."""
        return self.header_sent is not None and self.header_sent.query() and self.departure.query()


@dataclass
class _IncomingMessage:
    """A message whose header is here."""

    message: Message
    arrival: Event


class GpuLink:
    """The link of one rank to the neighbouring stages of its replica; only `close` waits."""

    def __init__(
        self,
        outgoing: Mapping[Direction, tuple[Wire, Sender]],
        incoming: Mapping[Direction, tuple[Wire, Receiver]],
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
        # Recorded after `dense`, which may copy.
        ready = self._device.compute.record()
        _, lane = self._outgoing[direction]
        departure = lane.send(tensors, ready)
        self._sending[direction].append(_OutgoingMessage(message, header, departure))
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
        """Wait for the sends; messages that come until the neighbours close are dropped, so that
        nothing is left on the way. Both neighbours close together."""
        self._backoff.reset()
        while self.unsent:
            self.push()
            self._collect([])
            self._backoff.pause()
        ends = [
            wire.send_header(np.array([END], dtype=np.int64)) for wire, _ in self._outgoing.values()
        ]
        while (
            self._ended != set(self._incoming)
            or any(self._receiving.values())
            or not all(end.query() for end in ends)
        ):
            self._collect([])
            self._backoff.pause()

    def push(self) -> None:
        """Send the headers that may go, and let go of what is through.

        `arrivals` does so, too. Whoever waits for something else has to call this, since a
        neighbour may need the message before it joins in what is waited for.
        """
        for direction, (wire, lane) in self._outgoing.items():
            sending = self._sending[direction]
            # Before the next contents go: when memory is let go, torch ties its reuse to all that
            # NCCL's stream has been given by then.
            while sending and sending[0].query():
                sending.popleft()
            lane.advance()
            for one in sending:
                if one.header_sent is None:
                    if not one.departure.begun():
                        break
                    one.header_sent = wire.send_header(one.header)
                if one.header_sent.query():
                    one.departure.header_left()

    def _collect(self, messages: list[Message]) -> bool:
        """Look at both directions once and add what is complete; whether anything moved."""
        moved = False
        for direction, (wire, lane) in self._incoming.items():
            while (header := wire.receive_header()) is not None:
                moved = True
                if header[0] == END:
                    self._ended.add(direction)
                    continue
                message = decode_header(header, direction, lane.empty)
                arrival = lane.receive(contents(message))
                self._receiving[direction].append(_IncomingMessage(message, arrival))
            lane.advance()
            receiving = self._receiving[direction]
            while receiving and receiving[0].arrival.query():
                messages.append(receiving.popleft().message)
                moved = True
        return moved
