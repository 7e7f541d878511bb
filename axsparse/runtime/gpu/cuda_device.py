"""The `Device` of a rank with a GPU, made of torch's streams, events and allocators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from axsparse.runtime.communication import Event
from axsparse.runtime.gpu.device_protocol import Mark

MILLISECONDS = 1e3


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
        elapsed: float = earlier._event.elapsed_time(self._event)
        return elapsed / MILLISECONDS


class CudaDevice:
    """One GPU."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        """`device` is the current CUDA device, and has an index."""
        self.device = device

    @property
    def compute(self) -> CudaStream:
        """The stream that is the current one when this is read."""
        return CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> CudaStream:
        # It has priority over compute, since other ranks wait for its messages.
        return CudaStream(torch.cuda.Stream(self.device, priority=-1))

    def pinned(self, nbytes: int) -> Tensor:
        # Torch keeps freed pinned memory, so that asking again needs no call of the driver.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> CudaMark:
        return CudaMark(self.device)
