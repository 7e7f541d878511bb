"""How torch's groups are made, asked after and reported about; no GPU is asked."""

from __future__ import annotations

import contextlib
import faulthandler
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from axsparse.runtime.errors import TrainingError
from axsparse.runtime.gpu import nccl
from axsparse.runtime.gpu.nccl import NcclCommunicator, NcclConnections, NcclPeer
from axsparse.runtime.local.local_world import LocalWorld, TurnBackoff


class Unreachable:
    """Members that NCCL finds no way between."""

    rank = 3

    def group(self, name: str, ranks: Sequence[int], max_ctas: int) -> nccl.Backend:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:\nConnection refused")


@pytest.mark.parametrize("what", ["peer", "communicator"])
def test_gpus_that_cannot_be_connected_are_named_in_one_line(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda seconds, **_: heard.append(seconds)
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: heard.append("ends"))
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")
    nothing = cast("Any", None)
    connections = NcclConnections(cast("Any", Unreachable()), nothing, nothing)

    ends: tuple[Any, ...] = (2, 3) if what == "peer" else ((2, 3),)

    with pytest.raises(TrainingError) as caught:
        getattr(connections, what)("some", *ends)

    assert str(caught.value) == (
        "transport: nccl: rank 3 on host n7 cannot connect the GPUs of ranks 2, 3 (NCCL error: "
        "unhandled system error Last error: Connection refused); NCCL_DEBUG=INFO says more, "
        "NCCL_SOCKET_IFNAME names the network; or choose transport: mpi"
    )
    assert heard == [nccl.CONNECT_SECONDS, "ends"], "a wait for ever ends this process"


class FakeWork:
    """An operation of torch's that completes when it is told to."""

    def __init__(self, failure: str = "") -> None:
        self.completed = False
        self.waits = 0
        self._failure = failure

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        assert self.completed, "a stream would wait for another GPU"
        self.waits += 1
        if self._failure:
            raise RuntimeError(self._failure)


class FakeBackend:
    """A process group of torch's whose operations complete at once, or when they are told to."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.works: list[FakeWork] = []
        self.error = "SUCCESS"
        self._at_once = at_once

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def send(self, *_: object) -> FakeWork:
        work = FakeWork()
        work.completed = self._at_once
        self.works.append(work)
        return work

    recv = allreduce = reduce = broadcast = send
    _reduce_scatter_base = _allgather_base = send


class FakeRendezvous:
    """Where this rank meets nobody, and notes how much of a device a group may occupy."""

    rank = 0

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def group(self, name: str, ranks: Sequence[int], max_ctas: int) -> FakeBackend:
        self.asked.append((name, max_ctas))
        return FakeBackend()


class FakeStream:
    stream = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.mark.usefixtures("without_cuda")
def test_connections_and_groups_occupy_a_bounded_part_of_the_device() -> None:
    """By default each may take 32 of an H100's 132 multiprocessors, and a rank has several."""
    rendezvous, backoff = FakeRendezvous(), TurnBackoff(LocalWorld(1), 0)
    device = SimpleNamespace(stream=FakeStream)
    connections = NcclConnections(cast("Any", rendezvous), cast("Any", device), backoff)

    connections.peer("peer", 0, 1)
    connections.communicator("group", (0, 1))

    assert rendezvous.asked == [("peer", 4), ("group", 16)]


@pytest.mark.parametrize("config", [SimpleNamespace(max_ctas=-1), SimpleNamespace(), None])
def test_torch_is_told_how_many_thread_blocks_nccl_may_take(
    config: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of a torch that is built for an old NCCL know no such number."""

    class Group:
        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            self.options = options

        Options = SimpleNamespace if config is None else lambda: SimpleNamespace(config=config)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)

    group: Any = nccl.nccl_backend(cast("Any", None), 0, 2, 4)

    assert group.options.is_high_priority_stream
    if config is not None and hasattr(config, "max_ctas"):
        assert group.options.config.max_ctas == 4
    else:
        assert getattr(group.options, "config", None) == config


@pytest.mark.usefixtures("without_cuda")
def test_the_host_asks_after_operations_and_no_stream_waits_for_them() -> None:
    backend = FakeBackend(at_once=False)
    stream, buffer = cast("Any", FakeStream()), torch.zeros(4)
    peer = NcclPeer(cast("Any", backend), stream, 1)
    group = NcclCommunicator(cast("Any", backend), stream, 0, 2)

    events = [
        peer.send(buffer),
        peer.receive(buffer),
        group.all_reduce(buffer),
        group.reduce(buffer, 0),
        group.broadcast(buffer, 0),
        group.reduce_scatter(buffer[:2], buffer),
        group.all_gather(buffer, buffer[:2]),
    ]

    assert [event.query() for event in events] == [False] * 7
    for work in backend.works:
        work.completed = True
    assert [event.query() for event in events * 2] == [True] * 14
    assert [work.waits for work in backend.works] == [1] * 7, "so that torch lets go of tensors"


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("how", ["wait", "error"])
def test_an_exchange_that_failed_ends_the_run_in_one_line(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed operation counts as completed in torch, and its buffer holds nothing of worth."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")
    backend, work = FakeBackend(), FakeWork("remote\nerror" if how == "wait" else "")
    backend.error = "REMOTE_ERROR" if how == "error" else "SUCCESS"
    work.completed = True
    event = nccl.Operation(work, cast("Any", backend), cast("Any", FakeStream()))

    with pytest.raises(TrainingError, match="transport: nccl: an exchange between GPUs failed on"):
        event.query()
    with pytest.raises(TrainingError, match=r"host n7 \((remote error|REMOTE_ERROR)\); NCCL_DEBUG"):
        event.query()
