"""A device of threads: CPU memory, and streams that really run beside the host, for MPI ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from axsparse.runtime.communication import Event
from axsparse.runtime.gpu.device_protocol import Communicator, Mark
from axsparse.runtime.gpu.nccl import Backend, Rendezvous


class Reached:
    """An event of a thread."""

    def __init__(self) -> None:
        self.flag = threading.Event()

    def query(self) -> bool:
        return self.flag.is_set()


class ThreadStream:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> Reached:
        event = Reached()
        self._work.put(event.flag.set)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, Reached)
        self._work.put(event.flag.wait)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._work.put(lambda: target.copy_(source))

    def copy_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def _run(self) -> None:
        while True:
            self._work.get()()


class ThreadMark:
    """A `Mark` of a thread."""

    def __init__(self, stream: ThreadStream) -> None:
        self._stream = stream
        self._reached = threading.Event()
        self._time = 0.0

    def set(self) -> None:
        reached = self._reached = threading.Event()

        def run() -> None:
            self._time = time.perf_counter()
            reached.set()

        self._stream.enqueue(run)

    def wait(self) -> None:
        self._reached.wait()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, ThreadMark)
        assert self._reached.is_set() and earlier._reached.is_set()
        return self._time - earlier._time


class ThreadDevice:
    """A `Device` whose compute is the host's own thread."""

    kind = "cpu"

    def __init__(self, _device: torch.device | None = None) -> None:
        self.compute = ThreadStream()

    def stream(self) -> ThreadStream:
        return ThreadStream()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> ThreadMark:
        return ThreadMark(self.compute)


def gloo_backend(store: Store, rank: int, size: int, _max_ctas: int) -> Backend:
    """A group of torch's that needs no GPU."""
    return cast("Backend", dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))


class GlooPeer:
    """An `PeerConnection` of torch's process group for CPUs."""

    def __init__(self, backend: Backend, peer: int) -> None:
        self.stream = ThreadStream()
        self._backend = backend
        self._peer = peer

    def send(self, content: Tensor) -> Reached:
        self.stream.enqueue(lambda: self._backend.send([content], self._peer, 0).wait())
        return self.stream.record()

    def receive(self, content: Tensor) -> Reached:
        self.stream.enqueue(lambda: self._backend.recv([content], self._peer, 0).wait())
        return self.stream.record()

    def close(self) -> None:
        """Nothing is under way."""


class GlooConnections:
    """Peers between ranks that meet as those of NCCL do."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def peer(self, name: str, source: int, target: int) -> GlooPeer:
        backend = self._rendezvous.group(name, (source, target), 1)
        return GlooPeer(backend, 1 if self._rendezvous.rank == source else 0)

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        raise AssertionError("links make peers only")
