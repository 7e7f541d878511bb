"""The collectives of GPUs over stand-in devices: the contract of `Collective`, and more."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from axsparse.runtime.communication import Op, Work
from axsparse.runtime.errors import TrainingError
from axsparse.runtime.gpu.collectives import NcclCollective, TwoWayCollective
from axsparse.runtime.gpu.gpu_transport import PushingBackoff
from axsparse.runtime.machine import SleepingBackoff


class Failing:
    """An operation that takes a while and has failed then."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 2:
            raise TrainingError("an exchange between GPUs failed")
        return False


def test_what_failed_while_compute_waited_is_told_at_the_next_pause_or_start() -> None:
    backoff = PushingBackoff(SleepingBackoff())
    compute = SimpleNamespace(record=lambda: None, wait=lambda event: None)
    communicator = SimpleNamespace(
        rank=0, size=2, stream=compute, all_reduce=lambda buffer: Failing()
    )
    for look in ("pause", "start"):
        group = NcclCollective(
            cast("Any", communicator), cast("Any", SimpleNamespace(compute=compute)), backoff
        )
        backoff.pushes = [group.advance]
        group.start(Op.ALL_REDUCE, torch.ones(2)).before_compute()
        again = backoff.pause if look == "pause" else group.advance
        again()
        again()
        with pytest.raises(TrainingError, match="an exchange between GPUs failed"):
            backoff.pause() if look == "pause" else group.start(Op.ALL_REDUCE, torch.ones(2))


class Noted:
    """A collective that keeps what it was to do, and does nothing."""

    rank, size, bytes_sent = 0, 1, 7

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        self.buffers.append(buffer)
        return self

    def poll(self) -> bool:
        return True


def test_buffers_of_the_hosts_stay_with_the_hosts() -> None:
    """Small agreements are not sent through a GPU."""
    hosts, devices = Noted(), Noted()
    group = TwoWayCollective(hosts, devices, "meta")
    here, there = torch.zeros(1), torch.zeros(1, device="meta")

    group.start(Op.ALL_REDUCE, here)
    group.start(Op.ALL_REDUCE, there)

    assert hosts.buffers[0] is here and devices.buffers[0] is there
    assert (len(hosts.buffers), len(devices.buffers)) == (1, 1)
    assert (group.rank, group.size, group.bytes_sent) == (0, 1, 14)
