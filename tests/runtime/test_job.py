"""Transports of trainers that come and go in one job, and the last words of a rank."""

from __future__ import annotations

import copy
import io
import random
import sys
from typing import NoReturn

import numpy as np
import pytest
import torch

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.job import Job, _last_words, run_here
from axsparse.runtime.local.local_transport import Local, LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


class Closable(LocalTransport):
    """Notes which of its branches were closed, by their numbers."""

    def __init__(self, world: LocalWorld[list[int]], rank: int) -> None:
        super().__init__(world, rank)
        self.closed: list[int] = []
        self.opened = [0]
        self.number = 0

    def branch(self: Local) -> Local:
        branch = copy.copy(self)
        assert isinstance(self, Closable) and isinstance(branch, Closable)
        self.opened[0] += 1
        branch.number = self.opened[0]
        return branch

    def close(self) -> None:
        self.closed.append(self.number)


class Owner:
    """A trainer's parts, which know of each other."""

    def __init__(self) -> None:
        self.itself = self


def test_what_all_ranks_have_let_go_of_is_closed_on_all_of_them() -> None:
    world: LocalWorld[list[int]] = LocalWorld(3)

    def body(rank: int) -> list[int]:
        transport = Closable(world, rank)
        job = Job(transport)
        job.branch()
        first = Owner()
        job.keep_branch(first)
        job.branch()
        second = Owner()
        job.keep_branch(second)
        assert not transport.closed
        if rank != 1:
            del first
        del second
        job.branch()
        assert transport.closed == [2]  # rank 1 still has the first
        first = Owner()
        job.branch()
        return transport.closed

    # What no trainer came of, the third, goes as well.
    assert world.run(body) == [[2, 1, 3]] * 3


def test_last_words_are_written_in_one_piece_since_others_may_speak_at_the_same_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = []

    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    class Ending(LocalTransport):
        def abort(self, code: int) -> NoReturn:
            sys.exit(code)

    world: LocalWorld[None] = LocalWorld(1)
    monkeypatch.setattr(sys, "stderr", Pieces())
    with pytest.raises(SystemExit):
        _last_words(Job(Ending(world, 0)), ConfigError("seed: 1"))

    assert pieces == ["axsparse: error: rank 0: seed: 1\n"]


def test_what_main_draws_is_the_same_on_every_rank_and_whoever_called_draws_on() -> None:
    def drawn(job: Job | None = None) -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: S311

    ranks = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        after = drawn()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        ranks.append(run_here(drawn))
        assert drawn() == after

    assert ranks[0] == ranks[1]


def test_a_process_alone_gets_the_result_and_the_errors() -> None:
    def fail(job: Job) -> None:
        raise ConfigError(f"a mistake on {job.where}")

    assert run_here(lambda job: (job.transport.size, job.transport.name)) == (1, "local")
    with pytest.raises(ConfigError, match="a mistake on rank 0"):
        run_here(fail)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_of_several_processes_none_is_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")

    with pytest.raises(ConfigError, match="run_here: 4 processes were started"):
        run_here(lambda job: None)
