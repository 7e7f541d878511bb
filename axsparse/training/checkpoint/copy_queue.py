"""Hands copies of tensors from training to the thread that writes them, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor


class CopyQueue:
    """A queue of tensors between two threads; `put` waits while the queue is full.

    The reader gets nothing before the queue is full or everything has been put: training waits
    while its state is copied, and a thread that writes meanwhile would only slow that down.
    """

    def __init__(self, limit_bytes: float) -> None:
        """An empty queue takes a tensor of any size, so that no `limit_bytes` is too small."""
        self._limit = limit_bytes
        self._tensors: deque[Tensor] = deque()
        self._held = 0
        self._taken = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_open = False

    def put(self, tensor: Tensor) -> None:
        """Add a tensor that nobody will change any more; after `close` it is dropped."""
        with self._changed:
            while self._held and self._held + tensor.nbytes > self._limit and not self._is_closed:
                self._open()
                self._changed.wait()
            if not self._is_closed:
                self._tensors.append(tensor)
                self._held += tensor.nbytes
                self._changed.notify_all()

    def all_put(self) -> None:
        """Say that there will be no more tensors."""
        with self._changed:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._changed.notify_all()

    def __iter__(self) -> CopyQueue:
        return self

    def __next__(self) -> Tensor:
        """The next tensor, once there is one; ConnectionAbortedError if there will be none.

        It counts towards the limit until the next one is asked for.
        """
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
        """Drop the tensors in the queue; neither thread waits any more."""
        with self._changed:
            self._is_closed = True
            self._tensors.clear()
            self._held = self._taken
            self._changed.notify_all()
