"""Master weights and moments that rest on the host and are on the GPU for their update only.

There are two places on the GPU, each with room for the largest layer's. While one layer is
updated in the first, the next one comes into the second, and the one before goes back:

    up        layer 0 → a   layer 1 → b                  layer 2 → a   …
    compute                 update 0 in a  update 1 in b               …
    down                                   a → layer 0   b → layer 1   …

Copies are of kept entries only, so that at a density of 0.1 they are a tenth of what AxoNN's
offloading (Singh and Bhatele 2022, section IV-D) moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Event
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.samo.layer_state import LayerState
from axsparse.samo.state_bytes import VISITS, visit_bytes
from axsparse.samo.tensor_state import RestingState


@dataclass(frozen=True)
class _Visit:
    """A layer's values on the GPU, and the event after which they are there."""

    here: RestingState
    arrived: Event


class Offload:
    """Brings what a layer's update needs, and takes it back."""

    def __init__(self, device: Device, layers: Sequence[LayerState], backoff: Backoff) -> None:
        """`layers`: all whose state rests on the host; their size may shrink later."""
        self._device = device
        self._backoff = backoff
        self._up, self._down = device.stream(), device.stream()
        self._free: list[Event | None] = [None] * VISITS
        """By place: when its last visit is back on the host, and with it all that left before."""
        sizes = [[tensor.nbytes for tensor in _tensors(layer.resting())] for layer in layers]
        size = max(map(visit_bytes, sizes), default=0)
        where = layers[0].backend.device if layers else torch.device("cpu")
        self._places = [torch.empty(size, dtype=torch.uint8, device=where) for _ in range(VISITS)]
        for layer in layers:
            layer.settle = self.settle

    @property
    def nbytes(self) -> int:
        """Of both places."""
        return sum(place.nbytes for place in self._places)

    def visits(self, layers: Sequence[LayerState]) -> Iterator[LayerState]:
        """The layers in order, each with its values on the GPU until the next is asked for."""
        coming = self._bring(layers[0], 0) if layers else None
        for number, layer in enumerate(layers):
            assert coming is not None
            visit = coming
            if number + 1 < len(layers):
                coming = self._bring(layers[number + 1], number + 1)
            compute = self._device.compute
            compute.wait(visit.arrived)
            with layer.visiting(visit.here):
                yield layer
            self._down.wait(compute.record())
            for rest, here in zip(_tensors(layer.resting()), _tensors(visit.here), strict=True):
                self._down.copy(rest, here)
            self._free[number % VISITS] = self._down.record()

    def settle(self) -> None:
        """Wait until all values are back on the host."""
        self._backoff.reset()
        while not all(event is None or event.query() for event in self._free):
            self._backoff.pause()

    def _bring(self, layer: LayerState, number: int) -> _Visit:
        free = self._free[number % VISITS]
        # Memory that is new here may have been something else's until now.
        self._up.wait(self._device.compute.record() if free is None else free)
        room, resting, at = self._places[number % VISITS], layer.resting(), 0
        put = []
        for rest in _tensors(resting):
            here = room[at : at + rest.nbytes].view(rest.dtype)
            self._up.copy(here, rest)
            put.append(here)
            at += visit_bytes([rest.nbytes])
        masters = 0 if resting.master is None else 1
        moments = dict(zip(resting.moments, put[masters:], strict=True))
        return _Visit(RestingState(put[0] if masters else None, moments), self._up.record())


def _tensors(rest: RestingState) -> list[Tensor]:
    own = [] if rest.master is None else [rest.master]
    return [*own, *rest.moments.values()]
