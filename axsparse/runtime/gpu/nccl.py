"""NCCL through torch: connections of two ranks and groups of several, each a process group.

Groups are made by their members alone, from a store of names and addresses, without torch's
default group and its global state. So a rank has few groups, of at most a column's size, however
large the job. `torch.distributed.new_group` cannot be used: with `use_local_synchronization` it
hashes a group's name from how many groups the *process* has made before, which differs between
the two ends of a peer connection.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from axsparse.runtime.communication import Backoff, Transport, wait_for
from axsparse.runtime.errors import ConfigError, TrainingError
from axsparse.runtime.exchange import gather_values, value_of_first
from axsparse.runtime.gpu.device import CudaDevice, CudaStream
from axsparse.runtime.gpu.rank_gpus import machine_name

TIMEOUT = timedelta(minutes=30)
"""How long torch's watchdog lets an operation wait before it ends the process; a send waits
through its neighbour's longest action, the first step's compilation included."""
STORE_TIMEOUT = timedelta(minutes=2)
"""How long a rank tries to reach the store, and to meet the other members of a group there."""
CONNECT_SECONDS = 600.0
"""How long the members of a group may take to connect; all begin at about the same time."""
PEER_CTAS = 4
"""The most thread blocks with which NCCL moves the contents of one connection; each occupies a
multiprocessor while it waits for the other end. By default they would be up to 32. Not measured."""
GROUP_CTAS = 16
"""The most thread blocks with which NCCL sums over one group. Not measured."""
ADDRESS = "MASTER_ADDR"
"""The environment variable, torch's own, with the address at which the others reach the first
rank; its host name if the variable is not set."""


MakeBackend = Callable[[Store, int, int, int], Any]
"""Makes a process group of torch's from a separate store, this rank's number in the group, the size
of the group, and the most thread blocks that it may occupy."""


class Rendezvous:
    """Brings the members of a group together through a store on the first rank."""

    def __init__(self, transport: Transport, make: MakeBackend) -> None:
        """All ranks call this together; ConfigError on a rank that cannot reach the first one."""
        self.rank = transport.rank
        self._make = make
        self._store = _open_store(transport)

    def group(self, name: str, ranks: Sequence[int], max_ctas: int) -> Any:
        """A group of these ranks, in this order, that occupies at most `max_ctas`
        multiprocessors. No other group of theirs has its name."""
        store = PrefixStore(f"{name} {' '.join(map(str, ranks))}", self._store)
        return self._make(store, list(ranks).index(self.rank), len(ranks), max_ctas)


def _open_store(transport: Transport) -> Store:
    """The store of all ranks, which the first one serves and whose port it broadcasts."""
    host = machine_name()
    hosts = set(gather_values(transport, host))
    if transport.rank == 0:
        # Left to itself, torch would listen to every host even if all ranks are on one.
        with socket.socket() as listening:
            listening.bind(("127.0.0.1" if len(hosts) == 1 else "", 0))
            listening.listen()
            store = TCPStore(
                "127.0.0.1",
                listening.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.fileno(),
            )
            listening.detach()  # the store owns the socket now
        address = os.environ.get(ADDRESS) or socket.gethostname()
        value_of_first(transport, [host, address, store.port])
        return store
    first, address, port = value_of_first(transport, None)
    if first == host:
        address = "127.0.0.1"
    try:
        return TCPStore(
            address, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
    except RuntimeError as reason:  # torch's DistNetworkError is one, too
        raise ConfigError(
            f"transport: nccl: rank {transport.rank} on host {socket.gethostname()} cannot reach "
            f"port {port} of {address} ({str(reason).splitlines()[0]}); set {ADDRESS} to an "
            "address of the first rank's host that all hosts reach, or choose transport: mpi"
        ) from reason


def nccl_backend(store: Store, rank: int, size: int, max_ctas: int) -> Any:
    """A group over NCCL, for `Rendezvous`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    options.is_high_priority_stream = True
    # A torch that is built for NCCL before 2.17 has none, and NCCL_MAX_CTAS bounds them there.
    config: Any = getattr(options, "config", None)
    if hasattr(config, "max_ctas"):
        config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Operation:
    """An operation of NCCL under way: a `CudaEvent` that the host asks torch after.

    A stream waits for it only where docs/decisions/026-gpu-transport.md shows that this ends:
    torch's streams share a few queues of the hardware, and a stream that waits for another GPU
    there could hold up one that must run.
    """

    def __init__(self, work: Any, backend: Any, stream: CudaStream) -> None:
        self._work: Any = work
        self._backend = backend
        self._stream = stream

    def query(self) -> bool:
        """Whether it has run; TrainingError if it failed."""
        if self._work is None:
            return True
        with _with_failure():
            if not self._work.is_completed():
                return False
        # Torch lets go of the tensors in this call; the operations that the stream waits for have
        # run.
        self.wait(self._stream.stream)
        # An operation that failed counts as completed; newer versions of torch say so here.
        ask = getattr(self._backend, "get_error", None)
        error = None if ask is None else ask().name
        if error not in (None, "SUCCESS"):
            raise _failure(error)
        self._work = None
        return True

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for it. Torch lets go of the tensors, whose memory may then be used
        anew on that stream."""
        if self._work is not None:
            with _with_failure(), torch.cuda.stream(stream):
                self._work.wait()


@contextlib.contextmanager
def _with_failure() -> Iterator[None]:
    """Raise TrainingError in place of torch's own error of an operation that failed."""
    try:
        yield
    except RuntimeError as reason:
        raise _failure(" ".join(str(reason).split())) from reason


def _failure(what: str) -> TrainingError:
    return TrainingError(
        f"transport: nccl: an exchange between GPUs failed on host {socket.gethostname()} "
        f"({what}); NCCL_DEBUG=INFO says more; or choose transport: mpi"
    )


class NcclGroup:
    """Ranks whose GPUs add and exchange on a stream of the group's own, in its order; of two ranks,
    also a connection for messages in one direction.

    All calls but `close` only enqueue. Ranks make the same calls in the same order, on contiguous
    buffers of equal length and type that stay alive until the returned operation is complete;
    `bounds` are as in `Collective.start`. Operations run on a stream of torch's inside NCCL, which
    waits for what the group's own stream has been given. Nothing ever waits there: memory to
    receive into comes from it. A send or a receive occupies a part of the GPU until the other end
    runs, so a receive is enqueued only once its send is next in its queue.
    """

    def __init__(self, backend: Any, stream: CudaStream, rank: int, size: int) -> None:
        """`backend` is a process group of torch's, `rank` this member's number in it."""
        self.rank = rank
        self.size = size
        self.stream = stream
        self._backend = backend

    def send(self, content: Tensor) -> Operation:
        return self._started(lambda: self._backend.send([content], 1 - self.rank, 0))

    def receive(self, content: Tensor) -> Operation:
        return self._started(lambda: self._backend.recv([content], 1 - self.rank, 0))

    def all_reduce(self, buffer: Tensor) -> Operation:
        return self._started(lambda: self._backend.allreduce([buffer]))

    def broadcast(self, buffer: Tensor) -> Operation:
        return self._started(lambda: self._backend.broadcast([buffer]))

    def reduce_scatter(self, buffer: Tensor, bounds: Sequence[int]) -> Operation:
        shards = _split(buffer, bounds)
        shard = shards[self.rank]
        if _are_equal(shards):
            return self._started(lambda: self._backend._reduce_scatter_base(shard, buffer))
        return self._started(lambda: self._backend.reduce_scatter([shard], [shards]))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Operation:
        shards = _split(buffer, bounds)
        shard = shards[self.rank]
        if _are_equal(shards):
            return self._started(lambda: self._backend._allgather_base(buffer, shard))
        return self._started(lambda: self._backend.allgather([shards], [shard]))

    def close(self) -> None:
        """Release the group, on which nothing is under way any more. May wait for the others."""
        # Torch before 2.6 names the call differently.
        name = "shutdown" if hasattr(self._backend, "shutdown") else "_shutdown"
        getattr(self._backend, name)()

    def _started(self, start: Callable[[], Any]) -> Operation:
        """An operation that runs after all earlier work of this group's stream."""
        with torch.cuda.stream(self.stream.stream):
            work = start()
        return Operation(work, self._backend, self.stream)


def _split(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """The shards of a buffer, which torch exchanges as one group of NCCL's calls, and so in one
    launch, where their sizes differ."""
    return [buffer[start:stop] for start, stop in itertools.pairwise(bounds)]


def _are_equal(shards: Sequence[Tensor]) -> bool:
    return len({shard.numel() for shard in shards}) == 1


class NcclConnections:
    """Makes connections of two ranks and groups of several, and uses each of them once.

    A call waits until all ranks of the group have made it with the same name, so ranks make their
    calls in an order that does not run in a circle. Raises TrainingError if NCCL cannot connect.
    NCCL connects at the first use and then holds up the host until all members join in, here for
    one byte. A group is then connected for all of its algorithms (`rank_gpus.CONNECT_AT_ONCE`), and
    peers are for good, since channels between two GPUs do not depend on how much is sent.
    """

    def __init__(self, rendezvous: Rendezvous, device: CudaDevice, backoff: Backoff) -> None:
        self._rendezvous = rendezvous
        self._device = device
        self._backoff = backoff

    def peer(self, name: str, source: int, target: int) -> NcclGroup:
        with self._connecting((source, target)), warnings.catch_warnings():
            # Torch warns that this makes a communicator of two, which is intended.
            warnings.filterwarnings("ignore", message=".*unbatched P2P op")
            group = self._group(name, (source, target), PEER_CTAS)
            use = group.receive if group.rank else group.send
            wait_for(use(group.stream.empty((1,), torch.uint8)), self._backoff)
            return group

    def communicator(self, name: str, ranks: Sequence[int]) -> NcclGroup:
        with self._connecting(ranks):
            group = self._group(name, ranks, GROUP_CTAS)
            wait_for(group.all_reduce(group.stream.empty((1,), torch.uint8)), self._backoff)
            return group

    def _group(self, name: str, ranks: Sequence[int], max_ctas: int) -> NcclGroup:
        backend = self._rendezvous.group(name, ranks, max_ctas)
        member = list(ranks).index(self._rendezvous.rank)
        return NcclGroup(backend, self._device.stream(), member, len(ranks))

    @contextlib.contextmanager
    def _connecting(self, ranks: Sequence[int]) -> Iterator[None]:
        """Raise TrainingError in place of torch's own errors. If NCCL waits for ever this process
        ends with a traceback, since nothing watches a run before it trains."""
        # Its timer is a thread of C, which runs while NCCL holds the interpreter.
        faulthandler.dump_traceback_later(CONNECT_SECONDS, exit=True)
        try:
            yield
        except RuntimeError as reason:
            text = " ".join(str(reason).split())
            raise TrainingError(
                f"transport: nccl: rank {self._rendezvous.rank} on host {socket.gethostname()} "
                f"cannot connect the GPUs of ranks {', '.join(map(str, ranks))} ({text}); "
                "NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME names the network; or choose "
                "transport: mpi"
            ) from reason
        finally:
            faulthandler.cancel_dump_traceback_later()
