"""The `Link` for tensors in GPU memory, and the two ways in which it moves their contents.

A message crosses from one stage to the next in two parts. Its *header* travels over a channel
between the hosts (`runtime/host_channel.py`, over MPI). Its contents travel

- over NCCL: straight from GPU to GPU (`NcclSender`, `NcclReceiver`). Each direction between two
  neighbours has a peer connection of its own, so that neither can hold up the other.
- staged: through pinned memory of both hosts, which a GPU reaches without waiting, and over the
  channel between them (`Staged`, which is both a sender and a receiver).

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

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Event, Message
from axsparse.runtime.gpu.device_protocol import Connections, Device, PeerConnection
from axsparse.runtime.grid import Place
from axsparse.runtime.host_channel import (
    QUIET_PASSES,
    Header,
    HostChannel,
    as_bytes,
    byte_pieces,
    contents,
    decode_header,
    dense,
    encode_header,
    neighbours,
)

END = -1
"""Replaces the microbatch number in the last header of a link, which closes the link."""


class Events:
    """Several events of one queue, in order, as one."""

    def __init__(self, events: list[Event]) -> None:
        self._left = events

    def query(self) -> bool:
        while self._left and self._left[0].query():
            self._left.pop(0)
        return not self._left


class NcclSend:
    """The contents of one message, which wait for their turn, then until their header has left,
    and then for the receiver."""

    def __init__(self, connection: PeerConnection, tensors: Sequence[Tensor], ready: Event) -> None:
        self._connection = connection
        self._tensors = tensors
        self._ready = ready
        self._is_next = False
        self._sends: Events | None = None

    def take_turn(self) -> bool:
        """Let the header go if the tensors are ready; called once nothing is in front of them."""
        self._is_next = self._ready.query()
        return self._is_next

    def begun(self) -> bool:
        """Whether the contents are ready and the next to be sent, so that the header may go."""
        return self._is_next

    def header_left(self) -> None:
        """Send the contents, since the header, which has the receiver look for them, has left."""
        if self._sends is None:
            # NCCL knows no int16, so contents go as bytes; with 64-bit counts they need no cutting.
            self._sends = Events([self._connection.send(as_bytes(t)) for t in self._tensors])
            self._tensors = ()

    def query(self) -> bool:
        return self._sends is not None and self._sends.query()


class NcclSender:
    """Enqueues a send on the device once its header has left and nothing is in front of it.

    A send spins on the device until its receive runs. If it were enqueued earlier, it could begin
    while the host is in a call that waits for the whole device, such as the allocator's last
    resort or the loading of a kernel. The header would then never go, and both would wait for
    ever.
    """

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._waiting: deque[NcclSend] = deque()
        self._last: NcclSend | None = None
        """The only message whose header may go, since the host could not tell when a send behind
        another begins on the device."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> NcclSend:
        """Start sending contiguous tensors, none of them empty, once `ready` is complete."""
        sent = NcclSend(self._connection, tensors, ready)
        self._waiting.append(sent)
        self.advance()
        return sent

    def advance(self) -> None:
        """Let the next message take its turn."""
        if self._last is not None and self._last.query():
            self._last = None
        if self._last is None and self._waiting and self._waiting[0].take_turn():
            self._last = self._waiting.popleft()


class NcclReceiver:
    """Enqueues receives at once; they are asked for when their header has arrived."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._connection.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return Events([self._connection.receive(as_bytes(tensor)) for tensor in tensors])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""


@dataclass
class StagedMessage:
    """The contents of one message on their way through pinned memory, in pieces."""

    tensors: Sequence[Tensor]
    """On the device, as bytes."""
    hosts: Sequence[Tensor]
    """Where the bytes of each are in pinned memory."""
    first: Event
    """Completes when the bytes are in pinned memory: copied there, or received."""
    ready: Event | None = None
    """Completes when the tensors may be read; None at the receiving end."""
    second: Event | None = None
    """Completes when the bytes have left pinned memory; None until they begin to."""

    def begun(self) -> bool:
        return self.ready is None or self.ready.query()

    def header_left(self) -> None:
        """Do nothing, since these contents wait for no receiver on the GPU."""

    def query(self) -> bool:
        return self.second is not None and self.second.query()


class Staged:
    """The sender or the receiver of one direction, by way of pinned memory.

    A sender copies contents from the device to the host and sends them from there; a receiver
    receives them on the host and copies them to the device.
    """

    def __init__(
        self, channel: HostChannel, device: Device, max_call_bytes: int = MAX_CALL_BYTES
    ) -> None:
        """No call of the channel carries more than `max_call_bytes`, the same on both ends."""
        self._channel = channel
        self._device = device
        self._stream = device.stream()
        self._max_call_bytes = max_call_bytes
        self._under_way: deque[StagedMessage] = deque()
        """Messages of which the second part has not begun."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor], ready: Event) -> StagedMessage:
        hosts = self._pinned(tensors)
        self._stream.wait(ready)
        for host, tensor in zip(hosts, tensors, strict=True):
            self._stream.copy(host, as_bytes(tensor))
        return self._begun(StagedMessage(tensors, hosts, self._stream.record(), ready))

    def receive(self, tensors: Sequence[Tensor]) -> StagedMessage:
        hosts = self._pinned(tensors)
        arrivals = Events([self._channel.receive(piece) for piece in self._pieces(hosts)])
        return self._begun(StagedMessage(tensors, hosts, arrivals))

    def advance(self) -> None:
        """Begin the second part of every message whose first part is complete, in order."""
        while self._under_way and self._under_way[0].first.query():
            message = self._under_way.popleft()
            if message.ready is not None:
                message.second = Events(
                    [self._channel.send(piece) for piece in self._pieces(message.hosts)]
                )
                continue
            for host, tensor in zip(message.hosts, message.tensors, strict=True):
                self._stream.copy(as_bytes(tensor), host)
            message.second = self._stream.record()

    def _begun(self, message: StagedMessage) -> StagedMessage:
        self._under_way.append(message)
        self.advance()
        return message

    def _pinned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pinned memory for the bytes of each, which torch keeps for the next ones."""
        return [self._device.pinned(tensor.nbytes) for tensor in tensors]

    def _pieces(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        return [piece for host in hosts for piece in byte_pieces(host, self._max_call_bytes)]


Sender = NcclSender | Staged
Receiver = NcclReceiver | Staged


@dataclass
class _OutgoingMessage:
    """A message on its way out, which keeps its tensors alive."""

    message: Message
    header: Header
    pending: NcclSend | StagedMessage
    header_sent: Event | None = None
    """None until the header is sent."""

    def query(self) -> bool:
        """Whether header and contents have been sent."""
        return self.header_sent is not None and self.header_sent.query() and self.pending.query()


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
        self._receiving: dict[Direction, deque[tuple[Message, Event]]]
        self._receiving = {d: deque() for d in incoming}
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
                self._receiving[direction].append((message, arrival))
            receiver.advance()
            receiving = self._receiving[direction]
            while receiving and receiving[0][1].query():
                messages.append(receiving.popleft()[0])
                moved = True
        return moved


def connect_peers(
    connections: Connections, place: Place, name: str
) -> dict[tuple[int, int], PeerConnection]:
    """This rank's ends of all connections to its neighbours, by (source, target).

    The two ends of a connection wait for each other when they make it. Ranks go through four
    rounds: forward ones that start at even stages, forward ones that start at odd stages, and
    backward ones likewise. Each rank makes at most one a round, so that no rank waits for a chain
    of others, however many stages there are. `name` tells links of the same ranks apart.
    """
    made: dict[tuple[int, int], PeerConnection] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(place, direction):
                stage = place.grid.place(source).stage
                if stage % 2 == parity:
                    made[source, target] = connections.peer(name, source, target)
    return made
