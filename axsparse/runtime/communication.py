"""What ranks need from a transport, as protocols; adapters live beside their users.

`Link` joins a stage to its neighbours, `Collective` joins a group of ranks. Both
start work and report completion when asked; waiting is always `Backoff`, so that
a rank with nothing to do leaves its core to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from axsparse.runtime.grid import Place

MAX_CALL_BYTES = 1 << 30
"""No MPI call sends or receives more: counts are 32-bit in older site libraries."""


class Direction(IntEnum):
    """Activations travel forward, gradients backward."""

    FORWARD = 0
    BACKWARD = 1


class Event(Protocol):
    """Says when a tensor's contents are ready; the CPU needs none."""

    def query(self) -> bool:
        """Whether the work recorded before the event has completed."""
        ...


@dataclass(frozen=True)
class Message:
    """One microbatch's tensors between neighbouring stages.

    The microbatch number is the message's identity. `tensors` may hold None in a
    backward message: a tensor that asked for a gradient and got none.
    `requires_grad` says, per tensor of a forward message, whether its gradient is
    to come back. `ready` fires when the tensors may be read; None means now.
    """

    direction: Direction
    microbatch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    ready: Event | None = None


class Link(Protocol):
    """Moves messages to and from the neighbouring stages, first in, first out.

    Neither call blocks the caller. Sent tensors stay alive until the transport
    is done with them, and must not be written to by the caller any more.
    """

    @property
    def bytes_sent(self) -> int:
        """Payload bytes handed to the transport since the link was made."""
        ...

    def send(self, message: Message) -> None:
        """Start sending: forward to the next stage, backward to the previous one."""
        ...

    def arrivals(self) -> list[Message]:
        """Messages that completed since the last call, in posting order per direction."""
        ...

    def push(self) -> None:
        """Move the sends on, as `arrivals` does, without taking anything in."""
        ...

    @property
    def unsent(self) -> int:
        """Messages whose tensors the transport still holds."""
        ...

    def close(self) -> None:
        """Wait for the sends and release the transport's resources."""
        ...


class Op(Enum):
    """Collective operations on a flat buffer, in place.

    `ALL_REDUCE` sums in rank order: halves are added in fp32 and rounded once.
    `REDUCE_SCATTER` leaves each rank the sum of its own shard; the rest of the buffer
    is undefined. `ALL_GATHER` fills the buffer from every rank's shard.
    `BROADCAST` copies rank 0's buffer.
    """

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


class Work(Protocol):
    """A collective under way."""

    def poll(self) -> bool:
        """Make progress; True once the buffer holds the result."""
        ...


class Collective(Protocol):
    """Operations over a group of ranks; all members start them in the same order."""

    rank: int
    """This member's number in the group."""
    size: int
    """Members of the group."""

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the transport for other members since the group was made."""
        ...

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Start an operation on a contiguous 1-D buffer that stays untouched until done.

        Rank r's shard is `buffer[bounds[r]:bounds[r + 1]]`; by default `shard_bounds`.
        """
        ...


class Backoff(Protocol):
    """One wait: `pause` between polls, longer the longer nothing happens."""

    pauses: int
    """Since the start; grows while the rank waits."""

    def pause(self) -> None:
        """Give the core to others for a moment."""
        ...

    def reset(self) -> None:
        """Something happened: poll eagerly again."""
        ...


def shard_bounds(numel: int, size: int) -> list[int]:
    """Where the shards of a flat buffer start and end: rank r owns [b[r], b[r + 1])."""
    return [rank * numel // size for rank in range(size + 1)]


def wait(work: Work, backoff: Backoff) -> None:
    """Poll until the work is done, sleeping in between."""
    backoff.reset()
    while not work.poll():
        backoff.pause()


class Transport(Protocol):
    """How one rank reaches the others; makes links and collectives."""

    name: str
    """Shown on the screen and in `config.yaml`."""
    rank: int
    size: int
    backoff: Backoff
    world: Collective
    """All ranks; used for small agreements only."""

    def link(self, place: Place) -> Link:
        """The link of this rank to its neighbours; all ranks of the grid call this together."""
        ...

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        """A group of ranks in this order; its members call this together, in equal order."""
        ...

    def branch(self) -> Transport:
        """Another transport of the same ranks, which may be closed ahead of this one."""
        ...

    def abort(self, code: int) -> NoReturn:
        """End the whole job at once."""
        ...

    def close(self) -> None:
        """Release what was made, branches too; all ranks call this together, and again without
        effect."""
        ...
