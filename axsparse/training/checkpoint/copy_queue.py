"""Copies of tensors on their way from training to the disk, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor


class Stream:
    """A queue of tensors from one thread to another; who puts waits while it is full.

    Nothing is taken before it is full or all has been put: training waits for what puts, and a
    writer beside it would only slow it down.
    """

    def __init__(self, limit_bytes: float) -> None:
        """One tensor is let in however large it is, so `limit_bytes` is never in the way of all."""
        self._limit = limit_bytes
        self._tensors: deque[Tensor] = deque()
        self._held = 0
        self._taken = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_open = False

    def put(self, tensor: Tensor) -> None:
        """Hand over a tensor that nobody writes to any more; dropped once nobody takes it."""
        with self._changed:
            while self._held and self._held + tensor.nbytes > self._limit and not self._is_closed:
                self._open()
                self._changed.wait()
            if not self._is_closed:
                self._tensors.append(tensor)
                self._held += tensor.nbytes
                self._changed.notify_all()

    def all_put(self) -> None:
        """Nothing more will be handed over."""
        with self._changed:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._changed.notify_all()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Tensor:
        """The next tensor, once it is there; it counts as held until the one after it is asked
        for. ConnectionAbortedError if there will be none."""
        with self._changed:
            self._held -= self._taken
            self._taken = 0
            self._changed.notify_all()
            while not (self._tensors and self._is_open) and not self._is_closed:
                self._changed.wait()
            if not self._tensors:
                raise ConnectionAbortedError("training ended")
            tensor = self._tensors.popleft()
            self._taken = tensor.nbytes
            return tensor

    def close(self) -> None:
        """Nobody puts or takes any more."""
        with self._changed:
            self._is_closed = True
            self._tensors.clear()
            self._held = self._taken
            self._changed.notify_all()
