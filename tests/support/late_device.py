"""A device whose streams are as late as they may be, and Gloo's groups in the place of NCCL's.

Compute runs when it is called. Every other stream does nothing before somebody asks for an event
three times or waits for one, so that whatever forgets to ask finds old contents. The only threads
are the ones that wait for Gloo, and so nothing here depends on time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from axsparse.runtime.communication import Event
from axsparse.runtime.gpu.device_protocol import Mark

HOST = torch.device("cpu")


class LateEvent:
    """An event that has completed when it is asked for the third time, or somebody waits."""

    def __init__(self, stream: LateStream, operations: int) -> None:
        self.is_open = True
        self._stream = stream
        self._operations = operations
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self.finish()
        return not self.is_open

    def finish(self) -> None:
        """Run all operations that were enqueued before it, if they have not run yet."""
        self._stream.run(self._operations)
        self.is_open = False


class LateStream:
    """A stream that does nothing before somebody waits for it, as late as it may.

    On the compute stream, whose operations run when they are called, waiting is done at once.
    """

    def __init__(self, memory: torch.device = HOST, *, computes: bool = False) -> None:
        """`memory` is where `empty` takes its tensors from."""
        self.events: list[LateEvent] = []
        self.most = 0
        """Events that were open at a time."""
        self._memory = memory
        self._computes = computes
        self._operations: list[Callable[[], object]] = []
        self._ran = 0

    def record(self) -> LateEvent:
        self.events.append(LateEvent(self, len(self._operations)))
        self.most = max(self.most, sum(event.is_open for event in self.events))
        return self.events[-1]

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if self._computes:
            event.finish()
        else:
            self._operations.append(event.finish)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert not self._computes, "copies have streams of their own"
        self._operations.append(lambda: target.copy_(source))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._memory)

    def run(self, upto: int) -> None:
        while self._ran < upto:
            self._ran += 1
            self._operations[self._ran - 1]()


class HostMark:
    """A `Mark` of compute that has run when it is called."""

    def __init__(self) -> None:
        self._time: float | None = None

    def set(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        assert self._time is not None

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        assert self._time is not None and earlier._time is not None
        return self._time - earlier._time


class LateDevice:
    """A `Device` with memory of the host's, or of another device of torch's."""

    def __init__(self, memory: torch.device = HOST) -> None:
        self.kind = memory.type
        self.compute = LateStream(memory, computes=True)
        self.pinned_bytes = 0
        self._memory = memory

    def stream(self) -> LateStream:
        return LateStream(self._memory)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        return HostMark()


def gloo_backend(store: Store, rank: int, size: int, _max_ctas: int) -> Any:
    """A group of torch's that needs no GPU."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
