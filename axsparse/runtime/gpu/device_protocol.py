"""What the GPU transport needs of a device, as protocols: queues of work, and memory.

`runtime/gpu/cuda_device.py` and `runtime/gpu/nccl.py` are the real ones. The tests have a stand-in
that finishes things late, in any order between queues, and notices what would go wrong.
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
        """An event that completes once all that was enqueued before it has."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on starts after this event, one of the same device."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between device memory and pinned host memory; both stay alive and as
        they are until an event recorded after it completes."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory that this stream may write to at once, and that the compute stream may
        use last."""
        ...


class Mark(Protocol):
    """A moment of the compute stream by the device's own clock; may be set over and over."""

    def set(self) -> None:
        """Enqueue it: it is reached once all that was enqueued before it has run."""
        ...

    def wait(self) -> None:
        """Return once it is reached."""
        ...

    def since(self, earlier: Mark) -> float:
        """Seconds since another mark of the same device; both are reached."""
        ...


class Device(Protocol):
    """The device of one rank."""

    @property
    def kind(self) -> str:
        """Type of the torch device of its tensors."""
        ...

    @property
    def compute(self) -> Stream:
        """Where the caller's tensors are made and used."""
        ...

    def stream(self) -> Stream:
        """A new queue beside it, for transfers."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, as bytes, that copies reach without waiting."""
        ...

    def mark(self) -> Mark:
        """A new mark, which is not set yet."""
        ...


class DeviceEdge(Protocol):
    """One end of a one-way connection between two ranks, in the order of a stream of its own.

    A receive waits on the device until its send runs, and holds a part of the device
    meanwhile: it is to be enqueued only once that send is next in its queue.
    """

    @property
    def stream(self) -> Stream:
        """In whose order contents move."""
        ...

    def send(self, content: Tensor) -> None:
        """Enqueue the sending of bytes, which stay alive and as they are until it has run."""
        ...

    def receive(self, content: Tensor) -> None:
        """Enqueue the receiving of as many bytes as are sent."""
        ...

    def close(self) -> None:
        """Release the connection; nothing is under way any more."""
        ...


class Communicator(Protocol):
    """A group of ranks whose devices add and exchange, in the order of a stream of its own.

    All calls enqueue. Members make the same calls in the same order.
    """

    rank: int
    size: int

    @property
    def stream(self) -> Stream:
        """In whose order operations run."""
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum over all members, in place."""
        ...

    def reduce(self, buffer: Tensor, root: int) -> None:
        """Sum over all members, in place on one; undefined on the others."""
        ...

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """One member's buffer to all."""
        ...

    def reduce_scatter(self, shard: Tensor, buffer: Tensor) -> None:
        """Each member's equal part of the sum; `shard` is this member's part of `buffer`."""
        ...

    def all_gather(self, buffer: Tensor, shard: Tensor) -> None:
        """All members' equal parts; `shard` is this member's part of `buffer`."""
        ...

    def close(self) -> None:
        """Release the connection; nothing is under way any more."""
        ...


class Connections(Protocol):
    """Makes edges and communicators, each known by its name on all of its members.

    A call waits until all members have made it: they are to be made in an order that
    does not run in a circle.
    """

    def edge(self, name: str, source: int, target: int) -> DeviceEdge:
        """This rank's end of a one-way connection between two ranks of the job."""
        ...

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A group of ranks of the job, in this order."""
        ...
