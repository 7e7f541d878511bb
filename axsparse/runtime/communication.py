"""The protocols by which ranks communicate; read this before you add a transport.

A `Transport` connects one rank to the others and makes two things: a `Link` between
neighbouring stages of a pipeline, and a `Collective` over a group of ranks. Both only start
work and say later whether it is complete. Waiting is always a loop around a `Backoff`, so
that a rank with nothing to do leaves its core to others.

There are three transports: for one process by itself (`runtime/local`), between processes over
MPI (`runtime/mpi`), and between GPUs (`runtime/gpu`); tests have one between threads
(`tests/support/local_world.py`). To add another one:

1. Write a class with the members of `Transport`, and classes for its links and collectives.
   Nothing has to be inherited.
2. Call its contracts on all ranks at once: every function of `CONTRACT` in
   `tests/support/link_contract.py` with at least two ranks, and every function of `CONTRACT` in
   `tests/support/collective_contract.py` with at least one. `tests/runtime/test_local_transport.py`
   shows how.
3. Choose it in `runtime/connection.py`, or in `training/placement.py` if a setting decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from axsparse.runtime.grid import RankCoords

MAX_CALL_BYTES = 1 << 30
"""One MPI call carries at most this many bytes, since older libraries count in 32 bits."""


class Direction(IntEnum):
    """Activations travel forward, gradients backward."""

    FORWARD = 0
    BACKWARD = 1


class Event(Protocol):
    """Work under way (device work, a send, a receive); `query` says whether it is complete.

    The memory that it works on stays alive and is not written to until it is complete.
    """

    def query(self) -> bool:
        """Whether it is complete; does not wait. Once True, it stays True."""


@dataclass(frozen=True)
class Message:
    """One microbatch's tensors between neighbouring stages.

    In a backward message None stands in `tensors` for a tensor that asked for a gradient and got
    none; in a forward message it stands before the activations of a teacher, if there is one.
    `requires_grad` says of each tensor of a forward message whether its gradient is to come back;
    if it is empty, none is.
    """

    direction: Direction
    microbatch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()


class Link(Protocol):
    """Moves messages between one rank and the stages before and after it.

    Messages of one direction arrive in the order in which they were sent, even if a later, smaller
    one is complete earlier. Between the two directions there is no order. No call but `close`
    waits. Both neighbours may send any amount before either of them receives.

    Messages move on only inside these calls, so a rank that waits for something else has to call
    `push` or `arrivals` meanwhile.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors handed over since the link was made, without headers."""

    def send(self, message: Message) -> None:
        """Start sending: forward to the next stage, backward to the previous one.

        Tensors may be strided and part of an autograd graph; the receiver gets them contiguous
        and without the graph. The link keeps them alive until they are sent. The caller may let go
        of them at once, and must not write to them any more.

        Raises AssertionError if there is no neighbour in this direction. A link between processes
        raises ValueError for a type of element that is not among `host_channel.DTYPES`.
        """

    def arrivals(self) -> list[Message]:
        """The messages that have arrived completely since the last call; sends make progress too.

        Every message that had arrived when the call began is among them. Tensors are contiguous
        leaves in separate memory, may be read at once, and belong to the caller.
        """

    def push(self) -> None:
        """Make progress on sends without receiving anything."""

    @property
    def unsent(self) -> int:
        """How many messages are not sent yet, as of the last `push`; their tensors stay alive."""

    def close(self) -> None:
        """Wait for the sends and release the link's resources; all ranks of the grid close
        together. A message that its receiver has not taken by then may be dropped."""


class Op(Enum):
    """Collective operations on a flat buffer, in place.

    `ALL_REDUCE` sums in rank order; half-precision numbers are added in fp32 and rounded once. NCCL
    alone adds and rounds in an unspecified order. `REDUCE_SCATTER` leaves each rank the sum of its
    own shard; the rest of the buffer is undefined. `ALL_GATHER` fills the buffer from every rank's
    shard. `BROADCAST` copies rank 0's buffer.
    """

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Sums:
    """Traffic of one tensor-parallel rank with the others, such as of one sample in one layer."""

    nbytes: int = 0
    """Bytes sent for each sample."""
    count: int = 0
    """Number of sums, independent of the number of samples."""
    fixed: int = 0
    """Bytes sent once, independent of the number of samples, such as gradients of norms."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.nbytes + other.nbytes, self.count + other.count, self.fixed + other.fixed)

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.nbytes - other.nbytes, self.count - other.count, self.fixed - other.fixed)

    def sent(self, samples: int) -> int:
        return samples * self.nbytes + self.fixed


NO_SUM = Sums()


class Work(Protocol):
    """A collective operation under way; keeps its buffer alive until it is complete."""

    def poll(self) -> bool:
        """Move the operation on; True once the buffer holds the result.

        Operations of one group may be polled in any order. Polling one of them moves the others
        on as well.
        """


class Collective(Protocol):
    """Operations over a group of ranks.

    All members start the same operations in the same order, with buffers of equal length and
    type and with equal bounds. Any number of operations may be under way at once.
    """

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the transport for other members since the group was made."""

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Start an operation in place and return at once.

        `buffer` is contiguous and has one dimension; the caller neither reads nor writes it until
        the work is done. Rank r's shard is `buffer[bounds[r]:bounds[r + 1]]`, where
        `bounds` has `size + 1` ascending entries from 0 to the buffer's length and may leave
        shards empty; None means `shard_bounds`. AssertionError for a buffer of another shape.
        """


class Backoff(Protocol):
    """How a rank waits: call `reset`, then `pause` between polls; pauses get longer with time.

    This package waits in no other way, so that a transport can use `pause` for work that must
    continue while its rank waits. One object serves all waits of a rank.
    """

    pauses: int
    """How often this rank has paused since the start."""

    def pause(self) -> None:
        """Give the core to others for a moment."""

    def reset(self) -> None:
        """Begin another wait, which polls eagerly at first."""


def shard_bounds(numel: int, size: int) -> list[int]:
    """The bounds of even shards of a flat buffer: rank r owns [b[r], b[r + 1])."""
    return [rank * numel // size for rank in range(size + 1)]


def wait(work: Work, backoff: Backoff, idle: Callable[[], object] = lambda: None) -> None:
    """Poll until the work is done; in between call `idle` and pause."""
    backoff.reset()
    while not work.poll():
        idle()
        backoff.pause()


def wait_for(event: Event, backoff: Backoff) -> None:
    """Query an event until it is complete, pausing in between."""
    backoff.reset()
    while not event.query():
        backoff.pause()


class Closable(Protocol):
    """Anything that a transport has made and closes when it is closed itself."""

    def close(self) -> None: ...


class Transport(Protocol):
    """The connections of one rank to the others."""

    name: str
    """Shown on the screen and in `config.yaml`."""
    rank: int
    size: int
    backoff: Backoff
    """How this rank waits for anything that the transport makes."""
    world: Collective
    """All ranks; used for small agreements only."""

    def link(self, coords: RankCoords) -> Link:
        """A new link of this rank to its neighbours, independent of all other links.

        All ranks of the grid, which are all ranks of the job, call this together.
        """

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        """A new group of ranks in this order, of which this rank is one.

        Its members call this together, with the same name and order, and make all groups that they
        share in the same order.
        """

    def branch(self) -> Transport:
        """Another transport of the same ranks, which may be closed before this one.

        What a branch has made is released when the branch is closed, or else with this transport.
        """

    def abort(self, code: int) -> NoReturn:
        """End the job at once with this exit code, without waiting for other ranks."""

    def close(self) -> None:
        """Release all that was made, branches included.

        All ranks call this together. A second call has no effect.
        """
