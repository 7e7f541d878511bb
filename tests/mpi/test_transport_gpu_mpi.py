"""The GPU transport over real MPI, on devices that are late, and Gloo's groups for NCCL's."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import (
    a_buffer_lives_until_its_operation_is_done,
    a_group_counts_and_adds_in_the_order_it_was_made_with,
    operations_in_flight_may_be_polled_in_any_order,
)
from support.devices import LateDevice, gloo_backend
from support.link_contract import CONTRACT
from support.on_mpi import on_mpi
from support.runs import all_here, tiny_config

from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.gpu import nccl
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.gpu.nccl import Rendezvous
from axsparse.runtime.gpu.rank_gpus import Gpu
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.samo.backend import Backend
from axsparse.training import placement as placing

SIZE = MPI.COMM_WORLD.size
COLLECTIVE = (
    a_group_counts_and_adds_in_the_order_it_was_made_with,
    operations_in_flight_may_be_polled_in_any_order,
    a_buffer_lives_until_its_operation_is_done,
)
"""Promises that differ over MPI; `tests/data_parallel` has the full contract in one process."""
needs_a_neighbour = pytest.mark.skipif(SIZE < 2, reason="one rank has no neighbour")


@needs_a_neighbour
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_staged_link_keeps_the_contract_over_mpi(promise: Callable[[Transport], None]) -> None:
    transport = GpuTransport(MpiTransport(MPI.COMM_WORLD), LateDevice(), connections=None)
    promise(transport)
    transport.close()


@pytest.mark.parametrize("promise", COLLECTIVE, ids=lambda promise: promise.__name__)
def test_a_staged_collective_keeps_the_contract_over_mpi(
    promise: Callable[[Transport], None],
) -> None:
    transport = GpuTransport(MpiTransport(MPI.COMM_WORLD), LateDevice(), connections=None)
    hosts = transport.world
    if promise is not a_buffer_lives_until_its_operation_is_done:
        transport.world = transport.collective("all", range(SIZE))
    promise(transport)
    transport.world = hosts
    transport.close()


def test_groups_of_some_ranks_meet_however_many_groups_each_has_made() -> None:
    """As the ends of a peer connection do, of which one has other neighbours and one has none."""
    with on_mpi() as transport:
        rendezvous = Rendezvous(transport, gloo_backend)
        groups = [
            (name, ranks)
            for ranks in [(first, first + 1) for first in range(SIZE - 1)]
            for name in ("there", "and back")
        ]
        made = [
            rendezvous.group(name, ranks, 1) for name, ranks in groups if transport.rank in ranks
        ]
        # The first rank has the store, and a group that is let go of closes its connections,
        # which the other end may still be making.
        all_here(transport)
        made.clear()


@needs_a_neighbour
def test_a_rank_that_cannot_reach_the_first_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_mpi() as transport:
        # Ranks of machines of one name, as containers may have, and an address that no name server
        # knows.
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        monkeypatch.setattr(nccl, "machine_name", lambda: f"elsewhere/{MPI.COMM_WORLD.rank}")
        monkeypatch.setattr(nccl, "STORE_TIMEOUT", timedelta(seconds=1))
        monkeypatch.setitem(os.environ, nccl.ADDRESS, "no-such-host.invalid")
        said = "transport: nccl: rank .* on host elsewhere cannot reach port .* of no-such-host"
        if transport.rank == 0:
            Rendezvous(transport, gloo_backend)
        else:
            with pytest.raises(ConfigError, match=said) as caught:
                Rendezvous(transport, gloo_backend)
            assert re.search(r"set MASTER_ADDR to an address", str(caught.value))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "gpus", "nccl_on", "way"),
    [
        ("auto", SIZE, range(SIZE), "nccl"),
        ("nccl", SIZE, range(SIZE), "nccl"),
        ("mpi", SIZE, range(SIZE), "pinned"),
        ("mpi", 1, (), "pinned"),
        ("auto", SIZE, (0,), "pinned"),
    ],
)
def test_contents_go_the_way_that_is_asked_for_or_that_there_is(
    asked: str, gpus: int, nccl_on: Sequence[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(torch.device("cuda", 0), None)
    memory = placing.GpuMemory(10**11, 10**11, "some")
    visible = [Gpu("H200", f"gpu {number}") for number in range(gpus)]
    has_nccl = MPI.COMM_WORLD.rank in nccl_on
    monkeypatch.setattr(placing, "visible_gpus", lambda: visible)
    monkeypatch.setattr(placing, "bind", lambda number, uuid: (backend, LateDevice(), memory))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(nccl, "nccl_backend", gloo_backend)
    monkeypatch.setattr(nccl, "NcclConnections", lambda meeting, *_: meeting)
    config = tiny_config(transport=asked, layout={"g_inter": 1})

    placement = placing.bind_rank(MpiTransport(MPI.COMM_WORLD), config.with_origins("test", {}))

    assert placement.backend == backend
    assert placement.memory is memory
    # One rank by itself needs no connections.
    assert placement.transport.name.startswith(f"{way}, mpi (" if SIZE > 1 else "mpi (")
    if SIZE > 1 and nccl_on == (0,):
        assert re.match(
            "warning: by way .* the torch of rank 1 on host .* without", placement.table[-1]
        )
    placement.transport.close()
