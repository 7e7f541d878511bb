"""Links over one-way channels between the hosts of neighbouring stages.

A message crosses from one stage to the next in two parts. Its *header* travels over a channel
between the hosts (`runtime/mpi/mpi_communication.py`). Its contents travel on a *way*:

- between tensors in the memory of the hosts over the same channel (`Direct`);
- between GPUs over NCCL or through pinned memory of the hosts (`runtime/gpu/gpu_transport.py`).

A message is sent once its tensors are ready. The receiver asks for contents only once their header
is there. Headers and contents each arrive in the order of sending, so no message needs a number.

The header is an int64 array that describes the message without its contents. Its words are the
microbatch, the number of tensors, and then for each tensor its type's number in `DTYPES` (−1 for
None), whether its gradient is to come back, the number of its dimensions and their sizes. The
direction is not in it, since each direction has a separate channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Event, Message
from axsparse.runtime.files.safetensors import DTYPES as STORED_DTYPES
from axsparse.runtime.grid import RankCoords

DTYPES = tuple(dtype for dtype in STORED_DTYPES.values() if not dtype.is_complex)
"""The types of element that messages carry; a header gives the position in this list."""
QUIET_PASSES = 2
"""A link stops looking for arrivals after this many looks in a row that find nothing. A look that
finds nothing may have let MPI take in messages (docs/decisions/013), and schedules must decide on
all arrivals."""
END = -1
"""Replaces the microbatch number in the last header of a link, which closes the link."""
Header = NDArray[np.int64]


class HostChannel(Protocol):
    """One end of a channel; one end sends and the other receives. No call waits.

    Headers arrive in the order in which they were sent, and so do pieces of contents; there is
    no order between the two.
    """

    def send_header(self, header: Header) -> Event: ...

    def receive_header(self) -> Header | None:
        """The next header, or None if it is not here yet."""

    def send(self, piece: Tensor) -> Event:
        """Start sending a flat tensor of bytes."""

    def receive(self, piece: Tensor) -> Event:
        """Start receiving into a flat tensor of bytes, which has the size of the sent message."""


class Way(Protocol):
    """Moves the contents of messages in one direction; one end sends and the other receives. No
    call waits."""

    sends_in_turn: bool
    """Whether a header goes only once all messages in front of it are through, and contents only
    once their header has left; otherwise both are sent as soon as the tensors are ready."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory to receive into, with undefined contents."""

    def send(self, tensors: Sequence[Tensor]) -> Event:
        """Start sending the contents of contiguous tensors."""

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        """Start receiving into tensors of the sent sizes."""

    def advance(self) -> None:
        """Move contents on that wait for the host."""


class Direct:
    """A `Way` between tensors in the memory of the hosts, over their channel."""

    sends_in_turn = False

    def __init__(self, channel: HostChannel, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        """No call of the channel carries more than `max_call_bytes`, the same on both ends."""
        self._channel = channel
        self._max_call_bytes = max_call_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def send(self, tensors: Sequence[Tensor]) -> Event:
        return Events([self._channel.send(piece) for piece in self._pieces(tensors)])

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return Events([self._channel.receive(piece) for piece in self._pieces(tensors)])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [piece for t in tensors for piece in as_bytes(t).split(self._max_call_bytes)]


class Events:
    """Several events of one queue, in order, as one."""

    def __init__(self, events: list[Event]) -> None:
        self._left = events

    def query(self) -> bool:
        while self._left and self._left[0].query():
            self._left.pop(0)
        return not self._left


@dataclass
class _OutgoingMessage:
    """A message on its way out, which keeps its tensors alive."""

    message: Message
    header: Header
    ready: Event
    header_sent: Event | None = None
    contents_sent: Event | None = None

    def query(self) -> bool:
        sent = self.header_sent, self.contents_sent
        return all(event is not None and event.query() for event in sent)


class ChannelLink:
    """The link of one rank to the neighbouring stages of its replica; only `close` waits."""

    def __init__(
        self,
        coords: RankCoords,
        ends: Callable[[Direction, int, int], tuple[HostChannel, Way]],
        backoff: Backoff,
        *,
        ready: Callable[[], Event] = lambda: Events([]),
    ) -> None:
        """`ends(direction, source, target)` makes this rank's end of a channel and its way.
        `ready` returns an event that completes once all tensors made so far have their values."""
        self.bytes_sent = 0
        self._ready = ready
        self._backoff = backoff
        self._outgoing: dict[Direction, tuple[HostChannel, Way]] = {}
        self._incoming: dict[Direction, tuple[HostChannel, Way]] = {}
        for direction in Direction:
            for source, target in neighbours(coords, direction):
                here = self._outgoing if source == coords.rank else self._incoming
                here[direction] = ends(direction, source, target)
        self._sending = {direction: deque[_OutgoingMessage]() for direction in self._outgoing}
        self._receiving = {
            direction: deque[tuple[Message, Event]]() for direction in self._incoming
        }
        self._ended: set[Direction] = set()

    def send(self, message: Message) -> None:
        assert message.direction in self._outgoing, "no such neighbour"
        tensors = tuple(None if t is None else t.detach().contiguous() for t in message.tensors)
        message = replace(message, tensors=tensors)
        header = encode_header(message)
        self.bytes_sent += sum(tensor.nbytes for tensor in contents(message))
        # The event comes after `contiguous`, which may enqueue a copy.
        outgoing = _OutgoingMessage(message, header, self._ready())
        self._sending[message.direction].append(outgoing)
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
        for direction, (channel, way) in self._outgoing.items():
            sending = self._sending[direction]
            # Memory is let go before the next contents are sent, since torch reuses it only after
            # all that NCCL's stream has been given by then.
            while sending and sending[0].query():
                sending.popleft()
            if not sending:
                continue
            way.advance()
            for number, one in enumerate(sending):
                if one.header_sent is None:
                    if not one.ready.query() or (number and way.sends_in_turn):
                        break
                    one.header_sent = channel.send_header(one.header)
                if one.contents_sent is None:
                    if way.sends_in_turn and not one.header_sent.query():
                        break
                    one.contents_sent = way.send(contents(one.message))

    def _collect(self, messages: list[Message]) -> bool:
        """Look at both directions once, add complete messages, and say if anything moved."""
        moved = False
        for direction, (channel, way) in self._incoming.items():
            receiving = self._receiving[direction]
            while (header := channel.receive_header()) is not None:
                moved = True
                if header[0] == END:
                    self._ended.add(direction)
                    continue
                message = decode_header(header, direction, way)
                receiving.append((message, way.receive(contents(message))))
            way.advance()
            while receiving and receiving[0][1].query():
                messages.append(receiving.popleft()[0])
                moved = True
        return moved


def encode_header(message: Message) -> Header:
    """The header of a message; ValueError if a tensor's type is not among `DTYPES`."""
    words = [message.microbatch, len(message.tensors)]
    need_gradients = message.requires_grad or (False,) * len(message.tensors)
    for tensor, requires_grad in zip(message.tensors, need_gradients, strict=True):
        if tensor is None:
            words += [-1, 0, 0]
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"a stage sends a tensor of {tensor.dtype}; messages carry "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            )
        words += [DTYPES.index(tensor.dtype), int(requires_grad), tensor.dim(), *tensor.shape]
    return np.array(words, dtype=np.int64)


def decode_header(words: Header, direction: Direction, way: Way) -> Message:
    """The message that a header describes, with tensors of the way's to receive into."""
    microbatch, count = words[:2].tolist()
    tensors: list[Tensor | None] = []
    requires_grad = []
    at = 2
    for _ in range(count):
        number, needs_gradient, dims = words[at : at + 3].tolist()
        at += 3
        shape = words[at : at + dims].tolist()
        at += dims
        tensors.append(None if number < 0 else way.empty(shape, DTYPES[number]))
        requires_grad.append(bool(needs_gradient))
    return Message(direction, microbatch, tuple(tensors), tuple(requires_grad))


def contents(message: Message) -> list[Tensor]:
    """The tensors of a message that have at least one element, in order."""
    return [tensor for tensor in message.tensors if tensor is not None and tensor.numel()]


def neighbours(coords: RankCoords, direction: Direction) -> list[tuple[int, int]]:
    """The (source, target) ranks between which this rank has messages to move in a direction."""
    rank, step = coords.rank, 1 if direction is Direction.FORWARD else -1
    before, after = coords.neighbour(-step), coords.neighbour(step)
    starts, ends = (coords.is_first, coords.is_last)[::step]
    return [(before, rank)] * (not starts) + [(rank, after)] * (not ends)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, without a copy."""
    assert tensor.is_contiguous(), "a copy would be received into, and lost"
    return bytes_of(tensor)
