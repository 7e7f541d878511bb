"""The running statistics of a stage, such as a BatchNorm's, and its other saved buffers.

Every replica trains with separate buffers, which follow from the samples that it has seen.
Evaluations and checkpoints use the buffers of the first replica.

Where gradients are summed exactly (`samo.gradient: exact`), running statistics are the same on all
replicas, and for any number of them. A microbatch turns a statistic r into a·r + b, of which b
follows from its samples. In such a run every microbatch of a step begins with the statistic s that
the step began with, and leaves some s′ = a·s + b. All replicas receive the statistics of all
microbatches, and apply them in the order of their numbers:

    r ← s′ + a·(r − s)

as in one process, but for rounding: in fp64, and rounded once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from axsparse.models.module_buffers import COUNT, BufferSlot, replaced, slots
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Op, shard_bounds
from axsparse.samo.shards import Replicas

Tensors = list[Tensor]


class RunningStatistics:
    """The buffers of one stage that are part of the saved state."""

    def __init__(
        self, modules: Sequence[nn.Module], replicas: Replicas, microbatches: int | None = None
    ) -> None:
        """`microbatches` is the number of a step, of all replicas together, if running statistics
        are to be the same for any number of replicas; None lets each replica have its own."""
        self._layers = [[slot for slot in slots(module) if slot.persists] for module in modules]
        self._replicas = replicas
        self._shares = shard_bounds(microbatches or 0, replicas.size)
        """The bounds of each replica's microbatches, if statistics are common."""
        self._is_common = microbatches is not None
        self._before: list[tuple[BufferSlot, Tensor]] = []
        self._left: list[Tensors] = []
        """The statistics that each microbatch left, but for the last one, whose are in place."""

    def begin(self) -> None:
        """Open a step: remember the running statistics."""
        self._before = [
            (slot, slot.tensor.clone())
            for layer in self._layers
            for slot in layer
            if slot.is_statistic
        ]
        self._left = []

    def before_forward(self, microbatch: int) -> None:
        """Have a microbatch begin with the statistics of the step's begin, if they are common.

        `microbatch` is its number on this replica; they come in ascending order.
        """
        if not self._is_common:
            return
        if microbatch:
            self._note()
        for slot, start in self._before:
            own = start.clone()
            if slot.key == COUNT:
                own += self._shares[self._replicas.rank] + microbatch
            slot.put(own)

    def finish(self) -> None:
        """Close a step that counts: join the statistics after the microbatches of all replicas.

        All replicas of a stage call this together.
        """
        if self._is_common and self._before:
            self._note()
            left = self._of_all_microbatches()
            norms: dict[nn.Module, list[int]] = {}
            for number, (slot, _) in enumerate(self._before):
                norms.setdefault(slot.owner, []).append(number)
            for numbers in norms.values():
                own = [self._before[number] for number in numbers]
                _join(own, [[each[number] for number in numbers] for each in left])
        self._before, self._left = [], []

    def _note(self) -> None:
        self._left.append([slot.tensor for slot, _ in self._before])

    def undo(self) -> None:
        """Reset the running statistics to their values at `begin`, after a step that is skipped."""
        for slot, tensor in self._before:
            slot.put(tensor)
        self._before, self._left = [], []

    @contextmanager
    def of_first_replica(self) -> Iterator[None]:
        """Give all replicas the buffers of the first one, inside a with-block.

        All replicas of a stage enter it together; afterwards each has its own buffers again.
        """
        received = [self._received([slot.tensor for slot in layer]) for layer in self._layers]
        pairs = zip(chain(*self._layers), chain(*received), strict=True)
        with replaced(list(pairs)):
            yield

    def _received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first replica's buffers of one layer; all types travel in one message."""
        if self._replicas.size == 1 or not tensors:
            return list(tensors)
        buffer = torch.cat([bytes_of(tensor) for tensor in tensors])
        self._replicas.exchange(Op.BROADCAST, buffer)
        return _unpacked(buffer, tensors)

    def _of_all_microbatches(self) -> list[Tensors]:
        """The statistics after every microbatch of the step, on the host, in one message."""
        like = [tensor for _, tensor in self._before]
        size = sum(tensor.nbytes for tensor in like)
        own = torch.cat([bytes_of(tensor) for left in self._left for tensor in left])
        bounds = [share * size for share in self._shares]
        everything = own.new_empty(bounds[-1])
        everything[bounds[self._replicas.rank] : bounds[self._replicas.rank + 1]] = own
        self._replicas.exchange(Op.ALL_GATHER, everything, bounds)
        return [_unpacked(part, like) for part in everything.cpu().split(size)]


def _join(norm: Sequence[tuple[BufferSlot, Tensor]], left: Sequence[Tensors]) -> None:
    """Store the statistics of one normalisation from the start `norm` and what each microbatch
    `left`."""
    number = next((n for n, (slot, _) in enumerate(norm) if slot.key == COUNT), None)
    begun = [0 if number is None else int(norm[number][1]) + n for n in range(len(left))]
    ended = [n + 1 for n in begun] if number is None else [int(each[number]) for each in left]
    for n, (slot, kept) in enumerate(norm):
        if n == number:
            slot.put(kept + (sum(ended) - sum(begun)))
            continue
        start = kept.cpu()
        first = joined = start.double()
        for after, before, end in zip((each[n] for each in left), begun, ended, strict=True):
            if not torch.equal(after, start):  # else the microbatch did not call the normalisation
                decay = _decay(slot.owner.momentum, before, end)
                joined = after.double() + decay * (joined - first)
        slot.put(joined.to(kept.dtype).to(kept.device))


def _decay(momentum: object, before: int, after: int) -> float:
    """The factor by which a microbatch has multiplied running statistics, from the counts of calls
    around it; one call if calls are not counted."""
    if momentum is None:  # the mean over all calls
        return before / after
    assert isinstance(momentum, float | int)
    return math.pow(1 - momentum, max(after - before, 1))


def _unpacked(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose bytes a buffer has, one after the other."""
    parts = buffer.split([tensor.nbytes for tensor in like])
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]
