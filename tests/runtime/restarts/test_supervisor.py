"""What a supervisor answers to the processes beside its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from axsparse.runtime.restarts.decision import Demand, Host, Placing
from axsparse.runtime.restarts.lifeline import GONE, JOINS, LEAVE, RUNS, STEPS, Beat
from axsparse.runtime.restarts.supervisor import Attempt, Plan, Supervisor

HOST = Host("here", 2)
ATTEMPT = 3


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    demand = Demand(ranks=2, microbatches=2)
    found = Supervisor(Plan(demand, (HOST,), False, ("mpirun",), ("train",), tmp_path, 5))
    yield found
    found._socket.close()
    for end in found._pipe:
        os.close(end)


@pytest.fixture
def beside(supervisor: Supervisor) -> Iterator[socket.socket]:
    """The socket of the process beside a rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(supervisor._socket.getsockname())
        found.settimeout(0.2)
        yield found


def answered(supervisor: Supervisor, beside: socket.socket, beat: Beat) -> tuple[bytes, bool]:
    """What comes back for a sign of life, and whether it counts for the attempt under way."""
    attempt = Attempt(ATTEMPT, Placing((HOST,)), 0.0)
    beside.send(beat.encode())
    supervisor._pause(1.0, attempt)
    try:
        said = beside.recv(64)
    except TimeoutError:
        said = b""
    return said, beat.rank in attempt.signs


def test_ranks_of_other_attempts_are_told_to_end(
    supervisor: Supervisor, beside: socket.socket
) -> None:
    now = Beat(supervisor._token, ATTEMPT, 1, RUNS, STEPS, 7)
    leave = LEAVE + b" " + supervisor._token.encode()

    assert answered(supervisor, beside, now) == (b"", True)
    assert answered(supervisor, beside, replace(now, attempt=2)) == (leave, False)
    assert answered(supervisor, beside, replace(now, attempt=2, process=GONE)) == (b"", False)


def test_what_is_not_of_this_run_is_passed_over(
    supervisor: Supervisor, beside: socket.socket
) -> None:
    now = Beat(supervisor._token, ATTEMPT, 1, RUNS, STEPS, 7)
    of_another = Beat("another", ATTEMPT, 1, RUNS, STEPS, 7)

    assert answered(supervisor, beside, of_another) == (b"", False)
    assert answered(supervisor, beside, replace(now, rank=2)) == (b"", False)
    beside.send(b"\xff no sign of life")
    assert answered(supervisor, beside, now) == (b"", True)


def test_a_start_of_which_nothing_is_heard_is_a_fault_once_ranks_were_heard_of(
    supervisor: Supervisor, beside: socket.socket
) -> None:
    supervisor._now = 100.0
    silent = Attempt(ATTEMPT, Placing((HOST,)), 0.0)
    assert supervisor._fault(silent) is None, "datagrams may not arrive at all"

    answered(supervisor, beside, Beat(supervisor._token, ATTEMPT, 1, RUNS, STEPS, 7))

    found = supervisor._fault(silent)
    assert found is not None and found.text.startswith("no rank has started for 1")


def test_a_start_whose_mpi_gets_nowhere_is_a_fault(
    supervisor: Supervisor, beside: socket.socket
) -> None:
    attempt = Attempt(ATTEMPT, Placing((HOST,)), 0.0)
    for rank in range(2):
        beside.send(Beat(supervisor._token, ATTEMPT, rank, RUNS, JOINS, 0).encode())
        supervisor._pause(1.0, attempt)
    assert supervisor._fault(attempt) is None

    attempt.phases[JOINS] -= 121.0

    found = supervisor._fault(attempt)
    assert found is not None and found.text.startswith("MPI has not started for 121")
