"""The protocols of a device that the GPU transport needs.

`cuda_device.py` has the real `Device`, `Stream` and `Mark`; `tests/support/devices.py` has
stand-ins, which finish work as late as they may.

Another kind of device implements these protocols. The contracts of `Link` and `Collective` then
have to hold on a `GpuTransport` that is made of it, as in `tests/mpi/test_transport_gpu_mpi.py`.
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
