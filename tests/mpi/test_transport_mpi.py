"""Communicators over MPI come back, and `Collective` keeps the contract in calls of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import CONTRACT
from support.on_mpi import on_mpi
from support.runs import mlp, tiny_config, vector_data

from axsparse.data.dataset import Datasets
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.job import Job
from axsparse.runtime.mpi.mpi_communication import MpiCollective
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.training.trainer import Trainer, build

SIZE = MPI.COMM_WORLD.size


def communicators(transport: MpiTransport) -> list[MPI.Comm]:
    """The communicators of a branch: of its link and its collectives."""
    own = [vars(one) for one in transport._made]
    found = [value for fields in own for value in fields.values() if isinstance(value, MPI.Comm)]
    return found + [comm for fields in own for comm in fields.get("_comms", {}).values()]


def test_a_trainer_that_is_gone_gives_its_communicators_back() -> None:
    model, data = mlp(), Datasets(vector_data())
    config = tiny_config(train={"steps": 2}, layout={"g_inter": SIZE})

    def trainer(job: Job) -> Trainer:
        built = build(job, model, lambda: data, config, quiet=True)
        built.step()
        return built

    with on_mpi() as transport:
        job = Job(transport)
        first, second = trainer(job), trainer(job)
        branches = [t.transport for t in (first, second)]
        found = [communicators(b) for b in branches if isinstance(b, MpiTransport)]
        assert [len(comms) >= 6 for comms in found] == [True, True]
        first.close()
        del first
        third = trainer(job)
        assert all(comm == MPI.COMM_NULL for comm in found[0])
        # Two at once are as good as two one after the other.
        assert second.step().loss == third.step().loss
        second.close()
        third.close()
    assert all(comm == MPI.COMM_NULL for comm in found[1])


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
