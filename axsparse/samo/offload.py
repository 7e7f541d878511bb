"""Master weights and moments that are offloaded to the host, and on the GPU for their update only.

There are two staging buffers on the GPU, each as large as the values of the largest layer. While
one layer is updated in the first, the values of the next are copied into the second, and the values
of the layer before are copied back:

    up        layer 0 → a   layer 1 → b                  layer 2 → a   …
    compute                 update 0 in a  update 1 in b               …
    down                                   a → layer 0   b → layer 1   …

Copies are of kept entries only, so that at a density of 0.1 they are a tenth of what AxoNN's
offloading (Singh and Bhatele 2022, section IV-D) moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from axsparse.runtime.communication import Backoff, Event
from axsparse.runtime.gpu.device import Device
from axsparse.samo.layer_state import LayerState, StateBuffers
from axsparse.samo.state_bytes import STAGED, aligned_bytes


class Offload:
    """Copies each layer's masters and moments to the GPU for its update, and back."""

    def __init__(self, device: Device, layers: Sequence[LayerState], backoff: Backoff) -> None:
        """`layers` are all layers of this rank whose state rests on the host; they never grow."""
        self._device = device
        self._backoff = backoff
        self._up, self._down = device.stream(), device.stream()
        self._free: list[Event | None] = [None] * STAGED
        """For each place, the event after which the values that it had are back on the host."""
        stored = [layer.optimizer_state.stored().tensors for layer in layers]
        size = max((aligned_bytes(one.nbytes for one in tensors) for tensors in stored), default=0)
        where = layers[0].backend.device if layers else torch.device("cpu")
        self._places = [torch.empty(size, dtype=torch.uint8, device=where) for _ in range(STAGED)]
        for layer in layers:
            layer.optimizer_state.finish_copies = self.finish_copies

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self._places)

    def staged_layers(self, layers: Sequence[LayerState]) -> Iterator[LayerState]:
        """The layers in order, each with its values on the GPU until the next is asked for."""
        coming = self._bring(layers[0], 0) if layers else None
        for number, layer in enumerate(layers):
            assert coming is not None
            here, arrived = coming
            if number + 1 < len(layers):
                coming = self._bring(layers[number + 1], number + 1)
            compute = self._device.compute
            compute.wait(arrived)
            state = layer.optimizer_state
            with state.staged(here):
                yield layer
            self._down.wait(compute.record())
            for rest, updated in zip(state.stored().tensors, here.tensors, strict=True):
                self._down.copy(rest, updated)
            self._free[number % STAGED] = self._down.record()

    def finish_copies(self) -> None:
        """Wait until all values are back on the host."""
        self._backoff.reset()
        while not all(event is None or event.query() for event in self._free):
            self._backoff.pause()

    def _bring(self, layer: LayerState, number: int) -> tuple[StateBuffers, Event]:
        """Begin to copy a layer's values to the GPU; the event says that they are there."""
        free = self._free[number % STAGED]
        # Before the first copy, the compute stream may still use this memory for something else.
        self._up.wait(self._device.compute.record() if free is None else free)
        room, stored, at = self._places[number % STAGED], layer.optimizer_state.stored(), 0
        put = []
        for rest in stored.tensors:
            put.append(room[at : at + rest.nbytes].view(rest.dtype))
            self._up.copy(put[-1], rest)
            at += aligned_bytes([rest.nbytes])
        master = None if stored.master is None else put.pop(0)
        here = StateBuffers(master, dict(zip(stored.moments, put, strict=True)))
        return here, self._up.record()
