"""Batches read ahead by a thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from axsparse.data.batches import Batch
from axsparse.data.prefetch import AHEAD, Prefetcher

PATIENCE = 30
"""Seconds after which a test gives up on a hanging thread; passing tests take far less."""


def read(step: int) -> Batch:
    return Batch(step, microbatches=(), num_targets=0)


@pytest.fixture(autouse=True)
def _no_test_hangs_and_no_thread_is_left() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still waiting after {PATIENCE} seconds")

    before = threading.enumerate()
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert threading.enumerate() == before


def test_batches_come_in_the_order_of_the_steps() -> None:
    with Prefetcher(read, first_step=5) as prefetcher:
        steps = [prefetcher.get(step).step for step in range(5, 25)]

    assert steps == list(range(5, 25))


def test_it_reads_so_many_batches_ahead_and_no_more() -> None:
    asked_for = 0
    leads: list[int] = []
    far_ahead = threading.Event()

    def read_and_note(step: int) -> Batch:
        leads.append(step - asked_for)
        if step == AHEAD - 1:
            far_ahead.set()
        return read(step)

    with Prefetcher(read_and_note, first_step=0) as prefetcher:
        far_ahead.wait()
        for step in range(200):
            asked_for = step + 1
            prefetcher.get(step)

    assert max(leads) == AHEAD - 1


def test_with_an_end_it_reads_no_further() -> None:
    steps: list[int] = []

    def read_and_note(step: int) -> Batch:
        steps.append(step)
        return read(step)

    with Prefetcher(read_and_note, first_step=2, end=5) as prefetcher:
        got = [prefetcher.get(step).step for step in (2, 3, 4)]
        with pytest.raises(AssertionError, match="step 5 is the end"):
            prefetcher.get(5)

    assert got == steps == [2, 3, 4]


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_what_read_raises_comes_out_of_get_at_its_step(kind: type[BaseException]) -> None:
    error = kind("disk gone")

    def read_twice(step: int) -> Batch:
        if step == 2:
            raise error
        return read(step)

    with Prefetcher(read_twice, first_step=0) as prefetcher:
        assert [prefetcher.get(step).step for step in (0, 1)] == [0, 1]
        with pytest.raises(kind) as caught:
            prefetcher.get(2)

    assert caught.value is error


def test_closing_waits_for_the_read_under_way() -> None:
    reading, may_end = threading.Event(), threading.Event()

    def read_slowly(step: int) -> Batch:
        reading.set()
        may_end.wait()
        return read(step)

    prefetcher = Prefetcher(read_slowly, first_step=0)
    reading.wait()
    threading.Thread(target=may_end.set).start()

    prefetcher.close()
    prefetcher.close()

    with pytest.raises(AssertionError, match="closed"):
        prefetcher.get(0)


def test_an_error_in_the_training_loop_ends_the_thread() -> None:
    with pytest.raises(KeyError), Prefetcher(read, first_step=0, end=0):
        raise KeyError
