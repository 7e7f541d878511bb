"""Tensors on their way to the disk."""

from __future__ import annotations

import threading

import pytest
import torch

from axsparse.training.checkpoint.copy_queue import CopyQueue


def test_tensors_come_out_in_the_order_they_went_in() -> None:
    stream = CopyQueue(1e9)
    for number in range(3):
        stream.put(torch.tensor([number]))
    stream.all_put()

    assert [next(stream).item() for _ in range(3)] == [0, 1, 2]


def test_who_puts_waits_while_it_is_full_and_no_longer() -> None:
    """Of five tensors of 8 bytes, no more than two are ever between the threads."""
    stream = CopyQueue(16)
    alive: list[int] = []
    most = 0

    def put() -> None:
        nonlocal most
        for number in range(5):
            stream.put(torch.tensor([number]))
            alive.append(number)
            most = max(most, len(alive))
        stream.all_put()

    thread = threading.Thread(target=put)
    thread.start()
    for _ in range(5):
        next(stream)
        # What was taken is held until the next is asked for, and one may be on its way in.
        while len(alive) == 0:
            pass
        alive.pop(0)
    thread.join()

    assert most <= 3


def test_nothing_is_taken_before_all_has_been_put() -> None:
    stream = CopyQueue(1e9)
    taken = threading.Event()

    def take() -> None:
        next(stream)
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()

    stream.put(torch.zeros(1))
    came_early = taken.wait(0.2)
    stream.all_put()
    thread.join()

    assert not came_early
    assert taken.is_set()


def test_a_tensor_larger_than_the_limit_passes_alone() -> None:
    stream = CopyQueue(1)
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.extend(next(stream).numel() for _ in range(2)))
    thread.start()

    stream.put(torch.zeros(10))
    stream.put(torch.zeros(20))
    stream.all_put()

    thread.join()
    assert taken == [10, 20]


def test_a_closed_stream_takes_nothing_and_lets_nobody_wait() -> None:
    stream = CopyQueue(1)
    stream.put(torch.zeros(10))

    stream.close()
    stream.put(torch.zeros(10))
    stream.put(torch.zeros(10))

    with pytest.raises(ConnectionAbortedError):
        next(stream)
