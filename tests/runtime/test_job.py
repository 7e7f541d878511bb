"""Transports of trainers that come and go in one job, and the last words of a rank."""

from __future__ import annotations

import copy
import io
import signal
import subprocess
import sys
from functools import partial
from typing import NoReturn

import pytest
from support.local_world import LocalWorld, Own, WorldTransport
from support.mpirun import LONGEST_SECONDS

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.job import Job, _last_words
from axsparse.runtime.local.local_transport import LocalTransport


class Closable(WorldTransport):
    """Notes which of its branches were closed, by their numbers."""

    def __init__(self, world: LocalWorld[list[int]], rank: int) -> None:
        super().__init__(world, rank)
        self.closed: list[int] = []
        self.opened = [0]
        self.number = 0

    def branch(self: Own) -> Own:
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


INTERRUPTED = """
import os, signal, time
from axsparse.runtime.job import run

class Own:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def main(job):
    Own()
    time.sleep(60)

run(main)
"""


def test_an_interrupt_that_comes_while_an_object_is_deleted_ends_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        # A test run in the background of a shell would hand down that SIGINT is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )

    said = "axsparse: error: interrupted; nothing was saved\n"
    assert (ended.returncode, ended.stderr) == (130, said)


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

    monkeypatch.setattr(sys, "stderr", Pieces())
    with pytest.raises(SystemExit):
        _last_words(Job(Ending()), ConfigError("seed: 1"))

    assert pieces == ["axsparse: error: rank 0: seed: 1\n"]
