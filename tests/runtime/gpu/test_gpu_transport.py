"""When a link over NCCL sends what; over MPI `tests/mpi` has the contract of a staged one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from axsparse.runtime.communication import Direction, Message
from axsparse.runtime.gpu.gpu_transport import Nccl
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import ChannelLink, HostChannel, Way

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class Flag:
    """An event that completes on request."""

    is_complete = False

    def query(self) -> bool:
        return self.is_complete


class Neighbours:
    """Two ends of one direction; nothing that either begins completes by itself."""

    def __init__(self) -> None:
        self.ready: list[Flag] = []
        """One for each message: its tensors have been made."""
        self.headers: list[Flag] = []
        """One for each header that was sent: it has left."""
        self.sends: list[Flag] = []
        self.receives: list[Flag] = []
        self.arriving = deque[Any]()
        channel = SimpleNamespace(
            send_header=self._send_header,
            receive_header=lambda: self.arriving.popleft() if self.arriving else None,
        )
        stream = SimpleNamespace(empty=lambda shape, dtype: torch.empty(*shape, dtype=dtype))
        connection: Any = SimpleNamespace(
            stream=stream,
            send=lambda content: self._begun(self.sends),
            receive=lambda content: self._begun(self.receives),
        )
        silent = SimpleNamespace(receive_header=lambda: None)

        def ends(direction: Direction, *_: int) -> tuple[HostChannel, Way]:
            return cast("Any", channel if direction is FORWARD else silent), Nccl(connection)

        def link(stage: int) -> ChannelLink:
            backoff: Any = None
            ready = partial(self._begun, self.ready)
            return ChannelLink(Grid(2, 1).coords(stage), ends, backoff, ready=ready)

        self.sender, self.receiver = link(0), link(1)

    def _begun(self, events: list[Flag]) -> Flag:
        events.append(Flag())
        return events[-1]

    def _send_header(self, header: np.ndarray[Any, Any]) -> Flag:
        self.arriving.append(header)
        return self._begun(self.headers)

    def send(self, *tensors: Tensor) -> None:
        self.sender.send(Message(FORWARD, len(self.ready), tensors))

    def counts(self) -> Sequence[int]:
        self.sender.push()
        return len(self.headers), len(self.sends)


def test_contents_wait_on_the_device_only_once_their_header_has_left() -> None:
    """A send that spins before would keep a host for ever that stands in a call which waits for all
    work of its device; so would a receive before its tensor is ready, which the header calls
    for."""
    both = Neighbours()
    both.send(torch.ones(3))
    both.send(torch.ones(3))

    assert both.counts() == (0, 0), "the tensor has not been made"
    both.ready[0].is_complete = both.ready[1].is_complete = True
    assert both.counts() == (1, 0), "the header has not left, and the next one waits"
    both.headers[0].is_complete = True
    assert both.counts() == (1, 1)
    assert both.sender.unsent == 2
    both.sends[0].is_complete = True
    assert both.counts() == (2, 1), "the next header goes once the first message is through"
    assert both.sender.unsent == 1


def test_a_message_arrives_once_its_contents_have_and_after_those_before_it() -> None:
    both = Neighbours()
    for _ in range(2):
        both.send(torch.ones(3))
        for events in (both.ready, both.headers, both.sends):
            both.sender.push()
            events[-1].is_complete = True
    both.counts()

    assert both.receiver.arrivals() == [] and len(both.receives) == 2
    both.receives[1].is_complete = True
    assert both.receiver.arrivals() == []
    both.receives[0].is_complete = True
    assert [message.microbatch for message in both.receiver.arrivals()] == [0, 1]


def test_a_message_to_no_neighbour_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="no such neighbour"):
        Neighbours().sender.send(Message(BACKWARD, 0, (torch.zeros(1),)))
