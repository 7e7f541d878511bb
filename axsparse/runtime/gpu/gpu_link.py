"""A `Link` for tensors in GPU memory: headers over a wire between hosts, contents over lanes.

The header of a message is sent once its tensors are ready and all that was sent before is
through. The receiver asks for contents only once their header is there. Both sequences are
first in, first out, so that no message needs a number on the way, and no GPU waits in a
receive through the whole forward of its neighbour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from axsparse.runtime.communication import Backoff, Direction, Event, Message
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.gpu.lane import Departure, Incoming, Outgoing
from axsparse.runtime.message_header import Header, contents, decode_header, dense, encode_header
from axsparse.runtime.wire import QUIET_PASSES, Request, Wire

END = -1
"""In the place of the microbatch: the last header, when a link closes."""


@dataclass
class _Sending:
    """A message on its way out, and what keeps its tensors alive."""

    message: Message
    header: Header
    departure: Departure
    request: Request | None = None
    """Of the header."""


@dataclass
class _Receiving:
    message: Message
    arrival: Event


class DeviceLink:
    """Neighbouring stages of one replica; neither `send` nor `arrivals` waits for a GPU."""

    def __init__(
        self,
        outgoing: Mapping[Direction, tuple[Wire, Outgoing]],
        incoming: Mapping[Direction, tuple[Wire, Incoming]],
        device: Device,
        backoff: Backoff,
    ) -> None:
        """`outgoing` and `incoming` have the directions in which there is a neighbour."""
        self.bytes_sent = 0
        self._outgoing = dict(outgoing)
        self._incoming = dict(incoming)
        self._device = device
        self._backoff = backoff
        self._sending: dict[Direction, deque[_Sending]] = {d: deque() for d in outgoing}
        self._receiving: dict[Direction, deque[_Receiving]] = {d: deque() for d in incoming}
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
        self._sending[direction].append(_Sending(message, header, departure))
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
            or not all(end.done() for end in ends)
        ):
            self._collect([])
            self._backoff.pause()
        for wire, _ in (*self._outgoing.values(), *self._incoming.values()):
            wire.close()

    def push(self) -> None:
        """Send the headers that may go, and let go of what is through.

        `arrivals` does so; whoever waits for something else has to, too, since a neighbour may
        need the message to come to where it is waited for.
        """
        for direction, (wire, lane) in self._outgoing.items():
            sending = self._sending[direction]
            # Before the next contents go: torch marks memory that is let go by all that NCCL's
            # stream has by then.
            while sending and _through(sending[0]):
                sending.popleft()
            lane.advance()
            for one in sending:
                if one.request is None:
                    if not one.departure.begun():
                        break
                    one.request = wire.send_header(one.header)

    def _collect(self, messages: list[Message]) -> bool:
        """One look at both directions, adding what is complete; whether anything moved."""
        moved = False
        for direction, (wire, lane) in self._incoming.items():
            while (header := wire.receive_header()) is not None:
                moved = True
                if header[0] == END:
                    self._ended.add(direction)
                    continue
                message = decode_header(header, direction, lane.empty)
                arrival = lane.receive(contents(message))
                self._receiving[direction].append(_Receiving(message, arrival))
            lane.advance()
            receiving = self._receiving[direction]
            while receiving and receiving[0].arrival.query():
                messages.append(receiving.popleft().message)
                moved = True
        return moved


def _through(one: _Sending) -> bool:
    return one.request is not None and one.request.done() and one.departure.done()
