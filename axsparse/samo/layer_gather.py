"""Brings the weights of one layer after the other from all replicas (ZeRO stage 3).

Each replica rounds the masters of its share to the training precision, and an all-gather brings the
other shares: w·k bytes for the k kept entries of a layer, of w bytes each, where dense shards would
take w·n. The layers of a forward or backward are known when it begins, so that the next layer's
gather is under way while one computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Collective, Op, Work
from axsparse.samo.state_bytes import GATHERED

if TYPE_CHECKING:
    from axsparse.samo.layer_state import LayerState


class LayerGather:
    """The gathers of a stage: all replicas ask for the same layers in the same order."""

    def __init__(self, group: Collective, backoff: Backoff) -> None:
        """`group` joins the replicas of the stage, for these gathers alone: the sums of gradients,
        which are under way at the same time, need not have the same place among them."""
        self._group, self._backoff = group, backoff
        self.idle: Callable[[], object] = lambda: None
        """Called while this rank waits for a gather, so that its messages are sent."""
        self.timed: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the waiting."""
        self._buffers: list[Tensor] = []
        self._begun = 0
        self._coming: deque[LayerState] = deque()
        """The layers of this pass whose gathers have not begun, in order."""
        self._under_way: deque[tuple[LayerState, Tensor, Work]] = deque()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other replicas since the start."""
        return self._group.bytes_sent

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def resize(self, entries: int, like: Tensor) -> None:
        """Have buffers for layers of at most so many kept entries, of the type and on the device of
        `like`."""
        if not self._buffers or self._buffers[0].numel() != entries:
            self._buffers.clear()
            self._buffers += [like.new_empty(entries) for _ in range(GATHERED)]

    def begin(self, layers: Iterable[LayerState]) -> None:
        """Open a pass, which needs the weights of these layers in this order."""
        assert not self._coming and not self._under_way, "one pass at a time"
        self._coming.extend(layers)
        self._start_next()

    def take(self, layer: LayerState) -> Tensor:
        """The kept weights of all owned tensors of a layer, once they have arrived; they stay until
        another layer is asked for. Layers of the pass that come before it are left out."""
        while True:
            assert self._under_way, f"{layer.name} is not expected in this pass"
            gathered, buffer, work = self._under_way.popleft()
            self._wait(work)
            self._start_next()
            if gathered is layer:
                return buffer

    def end(self) -> None:
        """Close the pass: replicas that have left out layers gather these all the same."""
        while self._under_way:
            self.take(self._under_way[-1][0])

    def drop(self) -> None:
        """Forget the pass, after an error."""
        self._coming.clear()
        self._under_way.clear()

    @torch.no_grad()
    def _start_next(self) -> None:
        if not self._coming:
            return
        layer = self._coming.popleft()
        bounds = layer.shares.bounds
        buffer = self._buffers[self._begun % GATHERED][: bounds[-1]]
        self._begun += 1
        layer.collect_weights(buffer)
        self._under_way.append((layer, buffer, self._group.start(Op.ALL_GATHER, buffer, bounds)))

    def _wait(self, work: Work) -> None:
        if not work.poll():
            with self.timed():
                self._backoff.reset()
                while not work.poll():
                    self.idle()
                    self._backoff.pause()
