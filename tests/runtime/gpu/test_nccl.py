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
from axsparse.runtime.gpu.nccl import NcclConnections, NcclGroup


class Unreachable:
    """Members that NCCL finds no way between."""

    rank = 3

    def group(self, name: str, ranks: Sequence[int], max_ctas: int) -> object:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:\nConnection refused")


@pytest.mark.parametrize(("what", "ends"), [("peer", (2, 3)), ("communicator", ((2, 3),))])
def test_gpus_that_cannot_be_connected_are_named_in_one_line(
    what: str, ends: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda seconds, **_: heard.append(seconds)
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: heard.append("ends"))
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")
    nothing = cast("Any", None)
    connections = NcclConnections(cast("Any", Unreachable()), nothing, nothing)

    with pytest.raises(TrainingError) as caught:
        getattr(connections, what)("some", *ends)

    assert str(caught.value) == (
        "transport: nccl: rank 3 on host n7 cannot connect the GPUs of ranks 2, 3 (NCCL error: "
        "unhandled system error Last error: Connection refused); NCCL_DEBUG=INFO says more, "
        "NCCL_SOCKET_IFNAME names the network; or choose transport: mpi"
    )
    assert heard == [nccl.CONNECT_SECONDS, "ends"], "a wait for ever ends this process"


class FakeWork:
    """An operation of torch's that completes on request."""

    def __init__(self, name: str, failure: str = "", *, completed: bool = True) -> None:
        self.name = name
        self.completed = completed
        self.may_be_awaited = False
        self.waits = 0
        self._failure = failure

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        assert self.completed or self.may_be_awaited, "a stream would wait for another GPU"
        self.waits += 1
        if self._failure:
            raise RuntimeError(self._failure)


class FakeBackend:
    """A process group of torch's whose operations complete at once, or on request."""

    def __init__(self, *, at_once: bool = True, error: str = "SUCCESS") -> None:
        self.works: list[FakeWork] = []
        self.get_error = lambda: SimpleNamespace(name=error)
        self._at_once = at_once

    def __getattr__(self, name: str) -> Any:
        def start(*_: object) -> FakeWork:
            self.works.append(FakeWork(name, completed=self._at_once))
            return self.works[-1]

        return start


class FakeStream:
    stream = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.mark.usefixtures("without_cuda")
def test_the_host_asks_after_operations_and_no_stream_waits_for_them() -> None:
    backend = FakeBackend(at_once=False)
    buffer = torch.zeros(4)
    group = NcclGroup(backend, cast("Any", FakeStream()), 0, 2)

    events = [
        group.send(buffer),
        group.receive(buffer),
        group.all_reduce(buffer),
        group.broadcast(buffer),
        *(exchange(buffer, [0, 2, 4]) for exchange in (group.reduce_scatter, group.all_gather)),
        *(exchange(buffer, [0, 3, 4]) for exchange in (group.reduce_scatter, group.all_gather)),
    ]

    assert [work.name for work in backend.works] == [
        *("send", "recv", "allreduce", "broadcast"),
        *("_reduce_scatter_base", "_allgather_base"),
        *("reduce_scatter", "allgather"),
    ]
    assert [event.query() for event in events] == [False] * 8
    for work in backend.works:
        work.completed = True
    assert [event.query() for event in events * 2] == [True] * 16
    assert [work.waits for work in backend.works] == [1] * 8, "so that torch lets go of tensors"


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [("remote\nerror", "SUCCESS", "remote error"), ("", "REMOTE_ERROR", "REMOTE_ERROR")],
)
def test_an_exchange_that_failed_ends_the_run_in_one_line(
    failure: str, error: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed operation counts as completed in torch, and its buffer holds nothing of worth."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")
    stream = cast("Any", FakeStream())
    event = nccl.Operation(FakeWork("sum", failure), FakeBackend(error=error), stream)

    for _ in range(2):
        with pytest.raises(
            TrainingError,
            match="transport: nccl: an exchange between GPUs failed on "
            rf"host n7 \({said}\); NCCL_DEBUG",
        ):
            event.query()
