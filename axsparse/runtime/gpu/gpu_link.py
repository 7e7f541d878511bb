"""The `Link` for tensors in GPU memory, and the two ways in which it moves their contents.

A message crosses from one stage to the next in two parts. Its *header* travels over a channel
between the hosts (`runtime/host_channel.py`, over MPI). Its contents travel

- over NCCL: straight from GPU to GPU (`Nccl`). Each direction between two neighbours has a separate
  peer connection, so that neither can hold up the other.
- staged: through pinned memory of both hosts, which a GPU reaches without waiting, and over the
  channel between them (`Staged`).

Work of a GPU is enqueued on *streams*, CUDA's queues, and *events* say when it is complete.
`device_protocol.py` describes peer connections, streams and devices. The tests replace these and
the channels by stand-ins, and run the link without a GPU.

A header is sent once its tensors are ready, and over NCCL once everything before it has been sent.
Contents follow once their header has left, and the receiver asks for contents only once their
header is there. So no GPU waits in a receive through the whole forward of its neighbour. Headers
and contents each arrive in the order of sending, so no message needs a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Event, Message
from axsparse.runtime.gpu.device_protocol import Connections, Device, PeerConnection
from axsparse.runtime.grid import RankCoords
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


class Nccl:
    """One direction, straight from GPU to GPU; one end sends and the other receives.

    A send spins on the device until its receive runs. If it were enqueued before its header has
    left, it could begin while the host is in a call that waits for all work of the device, such as
    the allocator's last resort or the loading of a kernel. The header would then never go, and both
    would wait for ever.
    """

    sends_in_turn = True
    """A header goes only once all messages in front of it are through, since the host could not see
    when a send behind another begins on the device."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._connection.stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor]) -> Event:
        # NCCL knows no int16, so contents go as bytes; with 64-bit counts they need no cutting.
        return Events([self._connection.send(as_bytes(tensor)) for tensor in tensors])

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return Events([self._connection.receive(as_bytes(tensor)) for tensor in tensors])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""


@dataclass
class StagedContents:
    """The contents of one message on their way into pinned memory, and then out of it."""

    first: Event
    """Completes when the contents are in pinned memory: copied there, or received."""
    begin_second: Callable[[], Event]
    """Moves the contents on from pinned memory, which this function keeps alive."""
    second: Event | None = None
    """Completes when they have left pinned memory; None until they begin to."""

    def query(self) -> bool:
        return self.second is not None and self.second.query()


class Staged:
    """One direction by way of pinned memory; one end sends and the other receives.

    The one copies contents from the device to the host and sends them from there; the other
    receives them on the host and copies them to the device.
    """

    sends_in_turn = False

    def __init__(
        self, channel: HostChannel, device: Device, max_call_bytes: int = MAX_CALL_BYTES
    ) -> None:
        """No call of the channel carries more than `max_call_bytes`, the same on both ends."""
        self._channel = channel
        self._device = device
        self._stream = device.stream()
        self._max_call_bytes = max_call_bytes
        self._under_way: deque[StagedContents] = deque()
        """Contents of which the second part has not begun."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor]) -> Event:
        hosts = self._pinned(tensors)
        for host, tensor in zip(hosts, tensors, strict=True):
            self._stream.copy(host, as_bytes(tensor))
        return self._begun(
            self._stream.record(),
            lambda: Events([self._channel.send(piece) for piece in self._pieces(hosts)]),
        )

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        hosts = self._pinned(tensors)

        def to_the_device() -> Event:
            for host, tensor in zip(hosts, tensors, strict=True):
                self._stream.copy(as_bytes(tensor), host)
            return self._stream.record()

        arrivals = [self._channel.receive(piece) for piece in self._pieces(hosts)]
        return self._begun(Events(arrivals), to_the_device)

    def advance(self) -> None:
        """Begin the second part of all contents whose first part is complete, in order."""
        while self._under_way and self._under_way[0].first.query():
            contents = self._under_way.popleft()
            contents.second = contents.begin_second()

    def _begun(self, first: Event, begin_second: Callable[[], Event]) -> Event:
        self._under_way.append(begun := StagedContents(first, begin_second))
        self.advance()
        return begun

    def _pinned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pinned memory for the bytes of each tensor; torch reuses it for later messages."""
        return [self._device.pinned(tensor.nbytes) for tensor in tensors]

    def _pieces(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        return [piece for host in hosts for piece in byte_pieces(host, self._max_call_bytes)]


Way = Nccl | Staged


@dataclass
class _OutgoingMessage:
    """A message on its way out, which keeps its tensors alive."""

    message: Message
    header: Header
    ready: Event
    """Completes when its tensors have been made."""
    header_sent: Event | None = None
    """None until the header is sent."""
    contents_sent: Event | None = None
    """None until the contents are, once the header has left."""

    def query(self) -> bool:
        """Whether header and contents have been sent."""
        return self.contents_sent is not None and self.contents_sent.query()


class GpuLink:
    """The link of one rank to the neighbouring stages of its replica; only `close` waits."""

    def __init__(
        self,
        outgoing: Mapping[Direction, tuple[HostChannel, Way]],
        incoming: Mapping[Direction, tuple[HostChannel, Way]],
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
        self.bytes_sent += sum(tensor.nbytes for tensor in contents(message))
        # The event comes after `dense`, which may enqueue a copy.
        ready = self._device.compute.record()
        self._sending[direction].append(_OutgoingMessage(message, header, ready))
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
            for number, one in enumerate(sending):
                if one.header_sent is None:
                    if not one.ready.query() or (number and sender.sends_in_turn):
                        break
                    one.header_sent = channel.send_header(one.header)
                if one.contents_sent is None:
                    if not one.header_sent.query():
                        break  # contents go in the order of their headers
                    one.contents_sent = sender.send(contents(one.message))

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
    connections: Connections, coords: RankCoords, name: str
) -> dict[tuple[int, int], PeerConnection]:
    """This rank's ends of all connections to its neighbours, by (source, target).

    The two ends of a connection wait for each other when they make it. Ranks go through four
    rounds: forward ones that start at even stages, forward ones that start at odd stages, and
    backward ones likewise. Each rank makes at most one a round, so that no rank waits for a chain
    of others, however many stages there are. `name` distinguishes links of the same ranks.
    """
    made: dict[tuple[int, int], PeerConnection] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(coords, direction):
                stage = coords.grid.coords(source).stage
                if stage % 2 == parity:
                    made[source, target] = connections.peer(name, source, target)
    return made
