"""The process beside a rank: what it tells, and how it ends the rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.mpirun import LONGEST_SECONDS

from axsparse.runtime.restarts.lifeline import (
    ENDS,
    GONE,
    LEAVE,
    RUNS,
    STARTS,
    STEPS,
    STOPPED,
    SUPERVISOR,
    Beat,
    Lifeline,
)

RANK = """
import signal, sys, time
from axsparse.runtime.restarts.lifeline import ENDS, STEPS, Lifeline
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
lifeline = Lifeline.begin()
for line in sys.stdin:
    phase, _, step = line.strip().partition(" ")
    lifeline.after(int(step or 0))
    lifeline.at(phase)
    if phase == "wait":
        while not told:
            time.sleep(0.01)
        sys.exit(75)
"""


class Supervised:
    """A rank, and the socket of its supervisor."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(LONGEST_SECONDS)
        port = self.socket.getsockname()[1]
        named = f"127.0.0.1/{port}/secret/4"
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            env={**os.environ, SUPERVISOR: named, "PMI_RANK": "3"},
            text=True,
            bufsize=1,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def hear(self, fits: Callable[[Beat], bool]) -> Beat:
        """The next datagram that fits."""
        while True:
            datagram, self.address = self.socket.recvfrom(512)
            beat = Beat.decode(datagram)
            assert beat is not None
            if fits(beat):
                return beat


@pytest.fixture
def rank() -> Iterator[Supervised]:
    supervised = Supervised()
    yield supervised
    supervised.process.kill()
    supervised.process.communicate()
    supervised.socket.close()


def test_a_rank_tells_that_it_lives_and_how_far_it_is(rank: Supervised) -> None:
    assert rank.hear(lambda beat: True) == Beat("secret", 4, 3, RUNS, STARTS, 0)
    rank.tell(f"{STEPS} 17")
    assert rank.hear(lambda beat: beat.phase == STEPS).step == 17
    rank.tell(ENDS)
    rank.hear(lambda beat: beat.phase == ENDS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_rank_is_told_at_once(rank: Supervised, number: int) -> None:
    rank.tell(f"{STEPS} 17")
    rank.hear(lambda beat: beat.phase == STEPS)
    rank.process.send_signal(number)

    assert rank.hear(lambda beat: beat.process == GONE).step == 17


def test_a_rank_that_is_stopped_is_told_of(rank: Supervised) -> None:
    rank.hear(lambda beat: True)
    rank.process.send_signal(signal.SIGSTOP)
    rank.hear(lambda beat: beat.process == STOPPED)
    rank.process.send_signal(signal.SIGCONT)
    rank.hear(lambda beat: beat.process == RUNS)


def test_a_rank_is_ended_if_its_supervisor_says_so(rank: Supervised) -> None:
    rank.hear(lambda beat: True)
    rank.socket.sendto(LEAVE + b" another", rank.address)
    rank.tell(f"{STEPS} 1")
    rank.hear(lambda beat: beat.step == 1)  # another supervisor's rank
    rank.socket.sendto(LEAVE + b" secret", rank.address)

    assert rank.process.wait(LONGEST_SECONDS) == -signal.SIGKILL


def test_a_rank_without_a_supervisor_is_told_to_save(rank: Supervised) -> None:
    rank.hear(lambda beat: True)
    rank.tell("wait")
    rank.socket.close()

    assert rank.process.wait(LONGEST_SECONDS) == 75


def test_without_a_supervisor_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    lifeline = Lifeline.begin({})
    lifeline.after(3)
    lifeline.at(STEPS)


@pytest.mark.parametrize("datagram", [b"", b"\xff", b"a 1 2 runs trains x", b"a 1 2 odd trains 3"])
def test_other_datagrams_say_nothing(datagram: bytes) -> None:
    assert Beat.decode(datagram) is None


def test_what_is_told_is_what_is_read() -> None:
    beat = Beat("secret", 1, 511, STOPPED, STEPS, 10**9)
    assert Beat.decode(beat.encode()) == beat
