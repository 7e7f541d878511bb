"""The protocols of a device that the GPU transport needs, and the `Device` of a rank with a GPU.

`CudaDevice` is made of torch's streams, events and allocators; `tests/support/devices.py` has
stand-ins, which finish work as late as they may.

Another kind of device implements these protocols. The contracts of `Link` and `Collective` then
have to hold on a `GpuTransport` that is made of it, as in `tests/mpi/test_transport_gpu_mpi.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from axsparse.runtime.communication import Event


class Stream(Protocol):
    """A queue of device work that is carried out in order; no call waits for the device."""

    def record(self) -> Event:
        """An event that completes once all that was enqueued before it has run."""

    def wait(self, event: Event) -> None:
        """Start all later work of the stream after this event, one of the same device; on the
        compute stream also after the operations that a communicator has begun there."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of equal shape and type within device memory, or between it and pinned
        host memory. Both stay alive and unchanged until an event recorded after it completes."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory with undefined contents that this stream may write to at once. The last to
        use it may be the compute stream; its memory is used anew only after that."""


class Mark(Protocol):
    """A moment of the compute stream by the device's own clock; may be set over and over."""

    def set(self) -> None:
        """Enqueue the mark: it is reached once all that was enqueued before it has run."""

    def wait(self) -> None:
        """Return once the mark is reached; one of the few calls that wait for a device."""

    def since(self, earlier: Mark) -> float:
        """Seconds since another mark of the same device; both have been reached."""


class Device(Protocol):
    @property
    def kind(self) -> str:
        """The type of the torch device that its tensors are on, such as "cuda"."""

    @property
    def compute(self) -> Stream:
        """The stream on which the caller's tensors are made and used."""

    def stream(self) -> Stream:
        """A new stream for transfers, next to the compute stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, as a flat tensor of bytes, that `Stream.copy` reaches without waiting."""

    def mark(self) -> Mark:
        """A new mark, which is not set yet."""


class CudaEvent(Event, Protocol):
    """An event of CUDA's, or an operation of NCCL's, for which a stream can wait."""

    def wait(self, stream: torch.cuda.Stream) -> None: ...


class CudaStream:
    """A `Stream` that is one of CUDA's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        cast("CudaEvent", event).wait(self.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        compute = torch.cuda.current_stream(self.stream.device)
        # The memory comes from this stream's own pool. Memory of the compute stream's pool could
        # still be in use by enqueued compute, and waiting for that would undo the overlap.
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.stream.device)
        # The tensor's memory goes back to the pool only once the compute that uses it has run.
        tensor.record_stream(compute)
        return tensor


class CudaMark:
    """A `Mark` that is a CUDA event with timing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)

    def set(self) -> None:
        # The current stream is the compute stream, also in the thread in which autograd runs a
        # hook.
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


class CudaDevice:
    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        """`device` is the current CUDA device, and has an index."""
        self.device = device

    @property
    def compute(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> CudaStream:
        # It has priority over compute, since other ranks wait for its messages.
        return CudaStream(torch.cuda.Stream(self.device, priority=-1))

    def pinned(self, nbytes: int) -> Tensor:
        # Torch keeps freed pinned memory, so that asking again needs no call of the driver.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> CudaMark:
        return CudaMark(self.device)
