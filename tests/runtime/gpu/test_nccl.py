"""What is said where NCCL cannot connect; no GPU is asked."""

from __future__ import annotations

import faulthandler
import socket
from collections.abc import Sequence
from typing import Any, cast

import pytest

from axsparse.runtime.errors import TrainingError
from axsparse.runtime.gpu import nccl
from axsparse.runtime.gpu.nccl import NcclConnections


class Unreachable:
    """Members that NCCL finds no way between."""

    rank = 3

    def group(self, name: str, ranks: Sequence[int], max_ctas: int) -> nccl.Backend:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:\nConnection refused")


@pytest.mark.parametrize("what", ["edge", "communicator"])
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

    ends: tuple[Any, ...] = (2, 3) if what == "edge" else ((2, 3),)

    with pytest.raises(TrainingError) as caught:
        getattr(connections, what)("some", *ends)

    assert str(caught.value) == (
        "transport: nccl: rank 3 on host n7 cannot connect the GPUs of ranks 2, 3 (NCCL error: "
        "unhandled system error Last error: Connection refused); NCCL_DEBUG=INFO says more, "
        "NCCL_SOCKET_IFNAME names the network; or choose transport: mpi"
    )
    assert heard == [nccl.CONNECT_SECONDS, "ends"], "a wait for ever ends this process"
