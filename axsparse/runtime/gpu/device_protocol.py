"""The protocols of a device and of NCCL that the GPU transport needs.

`cuda_device.py` has the real `Device`, `Stream` and `Mark`, `nccl.py` the real `Connections`, and
one class that is a `PeerConnection` and a `Communicator`. `tests/support/standin_device.py` and
`standin_transport.py` have stand-ins for all of them, which finish work late and in any order
between streams, and raise an error where a real device would now and then compute wrong numbers or
hang.

Another kind of device, or another library in NCCL's place, implements these protocols. The
contracts of `Link` and `Collective` then have to hold on a `GpuTransport` that is made of them, as
in `tests/runtime/gpu/test_gpu_link.py`, `test_collectives.py` and `tests/mpi/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from axsparse.runtime.communication import Event


class Stream(Protocol):
    """A queue of device work that is carried out in order; no call waits for the device."""

    def record(self) -> Event:
        """An event that completes once all that was enqueued before it has run."""
        ...

    def wait(self, event: Event) -> None:
        """Start all later work of the stream after this event, one of the same device; on the
        compute stream also after the operations that a communicator has begun there."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy within device memory, or between it and pinned host memory, of equal
        shape and type.

        Both stay alive and unchanged until an event that was recorded after the copy completes.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory with undefined contents that this stream may write to at once.

        The last to use it may be the compute stream; its memory is used anew only after that.
        """
        ...


class Mark(Protocol):
    """A moment of the compute stream by the device's own clock; may be set over and over."""

    def set(self) -> None:
        """Enqueue the mark: it is reached once all that was enqueued before it has run."""
        ...

    def wait(self) -> None:
        """Return once the mark is reached; one of the few calls that wait for a device."""
        ...

    def since(self, earlier: Mark) -> float:
        """Seconds since another mark of the same device; both have been reached."""
        ...


class Device(Protocol):
    """The device of one rank."""

    @property
    def kind(self) -> str:
        """The type of the torch device that its tensors are on, such as "cuda"."""
        ...

    @property
    def compute(self) -> Stream:
        """The stream on which the caller's tensors are made and used."""
        ...

    def stream(self) -> Stream:
        """A new stream for transfers, next to the compute stream."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, as a flat tensor of bytes, that `Stream.copy` reaches without waiting."""
        ...

    def mark(self) -> Mark:
        """A new mark, which is not set yet."""
        ...


class PeerConnection(Protocol):
    """One end of a one-way connection between the devices of two ranks.

    Contents move in the order of the connection's own stream; no call but `close` waits. Sends and
    receives occupy a part of the device until the other end runs, so the caller enqueues a receive
    only once its send is next in its queue, or is about to be enqueued there.

    What a call returns is complete once it has run; TrainingError if it failed. Nothing is
    enqueued that waits for it.
    """

    @property
    def stream(self) -> Stream:
        """The stream in whose order contents move, and whose memory they are received into."""
        ...

    def send(self, content: Tensor) -> Event:
        """Enqueue the sending of bytes, which stay alive and unchanged until it has run."""
        ...

    def receive(self, content: Tensor) -> Event:
        """Enqueue the receiving of bytes into memory of the size of the sent message."""
        ...

    def close(self) -> None:
        """Release the connection, on which nothing is under way any more.

        May wait until the other end is closed, too.
        """
        ...


class Communicator(Protocol):
    """A group of ranks whose devices add and exchange on a separate stream, in its order.

    All calls but `close` only enqueue, behind the work that the stream waits for. Ranks make the
    same calls in the same order, on contiguous buffers of equal length and type. The returned event
    is complete once the operation has run; TrainingError if it failed. Of all streams only compute
    waits for it.
    """

    rank: int
    """The number of this rank in the group."""
    size: int
    """The number of members."""

    @property
    def stream(self) -> Stream:
        """The stream in whose order operations run."""
        ...

    def all_reduce(self, buffer: Tensor) -> Event:
        """Leave the sum over all members in every member's buffer."""
        ...

    def broadcast(self, buffer: Tensor) -> Event:
        """Copy the first member's buffer to all members."""
        ...

    def reduce_scatter(self, buffer: Tensor, bounds: Sequence[int]) -> Event:
        """Leave the sum over all ranks of this rank's shard there; the rest of the buffer is
        undefined. `bounds` are as in `Collective.start`."""
        ...

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Event:
        """Fill the buffer from the shards of all members."""
        ...

    def close(self) -> None:
        """Release the connection, on which nothing is under way any more."""
        ...


class Connections(Protocol):
    """Makes peer connections and communicators, each known by the same name on all of its members.

    A call waits until all members have made it, so members make their calls in an order
    that does not run in a circle. A name is used once for the same ranks.
    """

    def peer(self, name: str, source: int, target: int) -> PeerConnection:
        """This rank's end of a one-way connection between two ranks of the job.

        TrainingError if they cannot be connected.
        """
        ...

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A group of ranks of the job, in this order; TrainingError as for a peer connection."""
        ...
