"""What carries the contents of messages between the GPUs of two neighbours, as protocols.

Each is one end of one direction: first in, first out. `DeviceLink` sends the headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from axsparse.runtime.communication import Event


class Departure(Protocol):
    """A message's contents on their way out."""

    def begun(self) -> bool:
        """Whether the contents are ready and next in their queue, so that the header may go."""
        ...

    def done(self) -> bool:
        """Whether the lane needs the tensors no more."""
        ...


class Outgoing(Protocol):
    """The sending end; no call waits."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Departure:
        """Start sending contiguous tensors, each with contents, once they are ready."""
        ...

    def advance(self) -> None:
        """Move on what waits for the host."""
        ...


class Incoming(Protocol):
    """The receiving end; no call waits."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to receive into."""
        ...

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        """Start receiving as much as is sent; the event completes when all of it is there."""
        ...

    def advance(self) -> None:
        """Move on what waits for the host."""
        ...
