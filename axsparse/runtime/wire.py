"""A one-way channel between the hosts of two neighbouring stages, as a protocol.

`MpiLink` sends whole messages over wires. The link of GPUs sends headers over them, and
contents too, where these pass through the hosts. `runtime/mpi/mpi_wire.py` implements it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from axsparse.runtime.communication import Direction, Event
from axsparse.runtime.grid import Place
from axsparse.runtime.message_header import Header
from axsparse.runtime.tensor_bytes import bytes_of

QUIET_PASSES = 2
"""A link stops looking for arrivals after this many looks in a row that find nothing. A look that
finds nothing may have let MPI take in what has come: after a long action one look saw nothing in
12 cases of 12 (MPICH 5.0), two saw everything, and schedules must decide on all arrivals."""


class Wire(Protocol):
    """One end of a channel; one end sends and the other receives. No call waits.

    Headers arrive in the order in which they were sent, and so do pieces of contents; there is
    no order between the two.
    """

    def send_header(self, header: Header) -> Event:
        """Start sending a header."""
        ...

    def receive_header(self) -> Header | None:
        """The next header, or None if it is not here yet."""
        ...

    def send(self, piece: Tensor) -> Event:
        """Start sending a flat tensor of bytes."""
        ...

    def receive(self, piece: Tensor) -> Event:
        """Start receiving into a flat tensor of bytes, which has the size of what is sent."""
        ...


class Wires(Protocol):
    """Makes the wires of one link."""

    def wire(self, direction: Direction, source: int, target: int) -> Wire:
        """This rank's end of the wire from `source` to `target`, of which it is one."""
        ...

    def close(self) -> None:
        """Release the wires, on which nothing is under way any more."""
        ...


def neighbours(place: Place, direction: Direction) -> list[tuple[int, int]]:
    """The (source, target) ranks between which this rank has messages to move in a direction."""
    rank, step = place.rank, 1 if direction is Direction.FORWARD else -1
    before, after = rank - step, rank + step
    starts, ends = (place.is_first, place.is_last)[::step]
    return [(before, rank)] * (not starts) + [(rank, after)] * (not ends)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, without a copy."""
    assert tensor.is_contiguous(), "a copy would be received into, and lost"
    return bytes_of(tensor)


def byte_pieces(tensor: Tensor, most: int) -> list[Tensor]:
    """The bytes of a contiguous tensor as views of at most `most` bytes; an empty one has none."""
    content = as_bytes(tensor)
    if 0 < content.numel() <= most:
        return [content]
    return [content[start : start + most] for start in range(0, content.numel(), most)]
