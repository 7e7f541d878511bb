"""When values that rest on the host are asked for.

`tests/behavior/test_on_device.py` has what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.devices import LateDevice, LateStream

from axsparse.runtime.machine import SleepingBackoff
from axsparse.samo.backend import HOST
from axsparse.samo.layer_state import StateBuffers
from axsparse.samo.offload import Offload


class Layer:
    backend = HOST
    finish_copies: object

    def __init__(self) -> None:
        self.optimizer_state = self
        self.rest = StateBuffers(torch.ones(3), {"exp_avg": torch.ones(3)})

    def stored(self) -> StateBuffers:
        return self.rest

    @contextmanager
    def staged(self, here: StateBuffers) -> Iterator[None]:
        yield


class Streams(LateDevice):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[LateStream] = []

    def stream(self) -> LateStream:
        self.made.append(LateStream())
        return self.made[-1]


def test_the_next_layer_is_on_its_way_while_one_is_updated() -> None:
    layers: list[Any] = [Layer() for _ in range(4)]
    device = Streams()
    offload = Offload(device, layers, SleepingBackoff())
    up, _ = device.made

    asked = [len(up.events) for _ in offload.staged_layers(layers)]

    assert asked == [2, 3, 4, 4]
