"""The running statistics of a stage, such as a BatchNorm's, and its other saved buffers.

Every replica trains with separate buffers, which follow from the samples that it has seen.
Evaluations and checkpoints use the buffers of the first replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from axsparse.models.module_buffers import BufferCopies, BufferSlot, replaced, slots, version
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import CODES
from axsparse.samo.shards import Replicas


class RunningStatistics:
    """The buffers of the modules of one stage."""

    def __init__(self, modules: Sequence[nn.Module], replicas: Replicas) -> None:
        self._slots = [slot for module in modules for slot in slots(module)]
        self._layers = [[slot for slot in slots(module) if slot.persists] for module in modules]
        self._replicas = replicas
        self._copies = BufferCopies(self._slots, "samo.gradient: auto")
        self._before: list[tuple[BufferSlot, Tensor]] = []
        self._may_repeat = False
        self._constant: set[str] = set()
        """Large buffers, by layer and name, that evaluations have left as they were."""

    def begin(self, *, may_repeat: bool = False) -> None:
        """Open the computation of a step's gradients, which may have to be repeated."""
        self._may_repeat = may_repeat
        statistics = (slot for slot in self._slots if slot.is_statistic)
        self._before = self._copies.take() if may_repeat else _copies_of(statistics)

    def keep(self) -> None:
        """Note that the gradients are not computed again: `undo` resets statistics alone."""
        if self._may_repeat:
            self._copies.learn(self._before, is_repeated=False)
            self._before = [pair for pair in self._before if pair[0].is_statistic]
            self._may_repeat = False

    def undo(self) -> None:
        """Reset buffers to their values at `begin`: all of them before the gradients are computed
        again, and the running statistics after a step that is skipped."""
        if self._may_repeat:
            self._copies.learn(self._before, is_repeated=True)
        for slot, tensor in self._before:
            slot.put(tensor)
        self._before = []

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Give the modules copies of the buffers, inside a with-block whose changes are dropped."""
        with replaced(_copies_of(slot for slot in self._slots if slot.persists or slot.is_small)):
            yield

    @contextmanager
    def of_first_replica(self, *, evaluates: bool) -> Iterator[None]:
        """Give all replicas the buffers of the first one, inside a with-block.

        All replicas of a stage enter it together; afterwards each has its own buffers again, as
        they were before if the block `evaluates`.
        """
        if self._replicas.size > 1:
            self._check_alike()
            received = [self._received([slot.tensor for slot in layer]) for layer in self._layers]
            with replaced([*zip(chain(*self._layers), chain(*received), strict=True)]):
                yield
        elif evaluates:
            with self._copied():
                yield
        else:
            yield

    @contextmanager
    def _copied(self) -> Iterator[None]:
        """Copies in the places of saved buffers. The first evaluation shows which of the large ones
        need none; ConfigError if a later one writes to one of these."""
        named = {
            f"{layer}/{slot.name}": slot for layer, own in enumerate(self._layers) for slot in own
        }
        constant = [(slot, slot.tensor) for name, slot in named.items() if name in self._constant]
        versions = [version(tensor) for _, tensor in constant]
        slots = {name: slot for name, slot in named.items() if name not in self._constant}
        before = [slot.tensor for slot in slots.values()]
        copies = _copies_of(slots.values())
        with replaced([*copies, *constant]):
            yield
            for name, tensor, (slot, copy) in zip(slots, before, copies, strict=True):
                now = slot.tensor
                if slot.is_small or version(copy) or now.shape != tensor.shape:
                    continue
                if bytes_of(now).equal(bytes_of(tensor)):
                    self._constant.add(name)
        for (slot, tensor), seen in zip(constant, versions, strict=True):
            if version(tensor) != seen:
                raise ConfigError(
                    f"buffer {slot.name!r} of {type(slot.owner).__name__}: an evaluation has begun "
                    "to write to it, and nothing has its earlier contents; write to it in every "
                    "evaluation, or in training alone"
                )

    def _check_alike(self) -> None:
        """ConfigError on all replicas if one has a saved buffer of another shape or type, which
        cannot be exchanged. As in `meet`, equal codes are found by sums of them and their squares.
        """
        saved = [*chain(*self._layers)]
        kinds = [f"{tuple(slot.tensor.shape)} {slot.tensor.dtype}" for slot in saved]
        codes = [zlib.crc32(kind.encode()) % CODES for kind in kinds]
        sums = torch.tensor([codes, [code**2 for code in codes]], dtype=torch.float64)
        self._replicas.exchange(Op.ALL_REDUCE, sums.view(-1))
        for slot, total, squares in zip(saved, *sums.tolist(), strict=True):
            if self._replicas.size * int(squares) != int(total) ** 2:
                raise ConfigError(
                    f"buffer {slot.name!r} of {type(slot.owner).__name__}: another replica has one "
                    "of another shape or type, and evaluations and checkpoints use the first "
                    "replica's; keep its shape and type, or set layout.g_data: 1"
                )

    def _received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first replica's buffers of one layer; all types travel in one message."""
        if not tensors:
            return []
        buffer = torch.cat([bytes_of(tensor) for tensor in tensors])
        self._replicas.exchange(Op.BROADCAST, buffer)
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


def _copies_of(slots: Iterable[BufferSlot]) -> list[tuple[BufferSlot, Tensor]]:
    return [(slot, slot.tensor.clone()) for slot in slots]
