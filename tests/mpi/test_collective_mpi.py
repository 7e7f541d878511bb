"""The contract of `Collective` over MPI, in calls of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import CONTRACT
from support.on_mpi import on_mpi

from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.mpi.mpi_communication import MpiCollective
from axsparse.runtime.mpi.mpi_transport import MpiTransport

SIZE = MPI.COMM_WORLD.size


class SmallCalls(MpiTransport):
    max_call_bytes = 500


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_an_mpi_collective_keeps_the_contract_in_small_calls(
    promise: Callable[[Transport], None],
) -> None:
    with on_mpi(SmallCalls) as transport:
        promise(transport)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_call_of_one_entry_is_the_smallest(dtype: torch.dtype) -> None:
    with on_mpi() as transport:
        collective = MpiCollective(MPI.COMM_WORLD, transport.backoff, max_call_bytes=1)
        buffer = torch.arange(7).to(dtype)

        wait(collective.start(Op.ALL_REDUCE, buffer), transport.backoff)
        collective.close()

    assert buffer.tolist() == [SIZE * n for n in range(7)]


def test_closing_finishes_what_is_under_way() -> None:
    with on_mpi() as transport:
        group = transport.collective("closing", range(SIZE))
        buffer = torch.ones(100_000, dtype=torch.bfloat16)
        group.start(Op.ALL_REDUCE, buffer)

    assert bool((buffer == SIZE).all())
