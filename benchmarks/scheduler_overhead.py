"""Python time of the scheduler outside the model and outside MPI: `make bench`.

One process plays the middle stage of three. The stage does nothing, and MPI is replaced by
a communicator that always has the next message; the time in both is taken off. What is left
is divided by the microbatches: each is one forward, one backward, two messages in and two
out. Median and quartiles of many steps, in CPU time of the thread, so that other processes count
for little; nothing waits, so that no back-off is in it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from mpi4py import MPI

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.schedules import Schedule
from axsparse.runtime.backoff import SleepingBackoff
from axsparse.runtime.communication import Direction, Message
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import encode_header
from axsparse.runtime.mpi.mpi_link import HEADER_TAG, MpiLink

MICROBATCHES = 64
STEPS = 300
ELEMENTS = 1 << 20
"""Of a message, in bf16: 2 MiB. Nobody writes or reads them."""


class Elsewhere:
    """Time that is not the scheduler's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Any) -> Any:
        """The same call, its time added here."""

        def wrapped(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.thread_time() - began

        return wrapped


class EmptyStage:
    """Hands on what it gets, in no time."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._outputs = (torch.empty(ELEMENTS, dtype=torch.bfloat16),)
        self.forward = elsewhere.timed(lambda *_: self._outputs)
        self.backward = elsewhere.timed(lambda *_: list(self._outputs))


class Probed:
    def __init__(self, header: Any, elsewhere: Elsewhere) -> None:
        self._header = header
        self.Recv = elsewhere.timed(self._recv)

    def _recv(self, buffer: Any) -> None:
        buffer[0][:] = self._header


class InstantComm:
    """A communicator on which everything has arrived: forwards from the start, a backward
    once its forward has been sent."""

    rank = 1

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere
        self.headers: deque[Any] = deque()
        self.on_send: Any = lambda: None
        self.Isend = elsewhere.timed(self._isend)
        self.Irecv = elsewhere.timed(lambda *_, **__: MPI.REQUEST_NULL)
        self.Improbe = elsewhere.timed(self._improbe)

    def _isend(self, _buffer: Any, dest: int, tag: int) -> MPI.Request:
        assert dest in (0, 2)
        if tag == HEADER_TAG:
            self.on_send()
        return MPI.REQUEST_NULL

    def _improbe(self, _source: int, _tag: int, status: MPI.Status) -> Probed | None:
        if not self.headers:
            return None
        header = self.headers.popleft()
        status.Set_elements(MPI.INT64_T, header.size)
        return Probed(header, self._elsewhere)


class Duplicable:
    """Gives the link its two communicators."""

    def __init__(self, comms: Sequence[InstantComm]) -> None:
        self._comms = iter(comms)

    def Dup(self) -> InstantComm:
        return next(self._comms)


def microseconds() -> list[float]:
    """Of engine, policy and link, per microbatch, in each step."""
    elsewhere = Elsewhere()
    forward, backward = InstantComm(elsewhere), InstantComm(elsewhere)
    tensors = (torch.empty(ELEMENTS, dtype=torch.bfloat16),)
    headers = {
        direction: [encode_header(Message(direction, n, tensors)) for n in range(MICROBATCHES)]
        for direction in Direction
    }
    returning: deque[Any] = deque()
    forward.on_send = lambda: backward.headers.append(returning.popleft())
    coords = Grid(3, 1).coords(1)
    comm: Any = Duplicable([forward, backward])
    stage: Any = EmptyStage(elsewhere)
    backoff = SleepingBackoff()
    engine = Engine(
        Rank(coords, backoff, Phases()),
        stage,
        MpiLink(comm, coords, backoff),
        schedule=Schedule("message-driven", 1, "alternate"),
        while_idle=lambda: None,
    )
    batch = Batch(0, tuple(Microbatch((), None, n, 1) for n in range(MICROBATCHES)), 1)
    found = []
    for _ in range(STEPS):
        forward.headers.extend(headers[Direction.FORWARD])
        returning.extend(headers[Direction.BACKWARD])
        elsewhere.seconds = 0.0
        began = time.thread_time()
        engine.train(batch, 1.0, 1.0, lambda _: None, lambda _: None)
        seconds = time.thread_time() - began - elsewhere.seconds
        found.append(1e6 * seconds / MICROBATCHES)
    return found
