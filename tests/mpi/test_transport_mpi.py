"""Communicators come back, so that a job may build as many trainers as it likes."""

from __future__ import annotations

from mpi4py import MPI
from support.on_mpi import on_mpi
from support.runs import mlp, tiny_config, vector_data

from axsparse.data.dataset import Datasets
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.training.trainer import Trainer, build

SIZE = MPI.COMM_WORLD.size


def communicators(transport: MpiTransport) -> list[MPI.Comm]:
    """The communicators of a branch: of its link and its collectives."""
    own = [vars(one) for one in transport._made]
    found = [value for fields in own for value in fields.values() if isinstance(value, MPI.Comm)]
    return found + [comm for fields in own for comm in fields.get("_comms", {}).values()]


def test_a_trainer_that_is_gone_gives_its_communicators_back() -> None:
    model, config, data = mlp(), tiny_config(train={"steps": 2}), Datasets(vector_data(), None)

    def trainer(job: Job) -> Trainer:
        built = build(job, model, lambda: data, config, grid=Grid(SIZE, 1), quiet=True)
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
