"""Devices without a GPU: one that is late, one that is none, one that is busy on request.

Compute of a late device runs when it is called. Every other stream does nothing before somebody
asks for an event three times or waits for one, so that whatever forgets to ask finds old contents.
The only threads are the ones that wait for Gloo, whose groups take the place of NCCL's, and so
nothing here depends on time.

Tensors of a pretended device compute as on the CPU, and as on a GPU torch refuses to mix both. So a
line that forgot where its tensors live fails here as it would there. Time is not pretended: every
operation has run when its call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from axsparse.runtime.communication import Event
from axsparse.runtime.gpu.device import Mark
from axsparse.samo.cuda.launch import Argument, Launcher

HOST = torch.device("cpu")


class LateEvent:
    """An event that has completed when it is asked for the third time, or somebody waits."""

    def __init__(self, stream: LateStream, operations: int) -> None:
        self.is_open = True
        self._stream = stream
        self._operations = operations
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self.finish()
        return not self.is_open

    def finish(self) -> None:
        """Run all operations that were enqueued before it, if they have not run yet."""
        self._stream.run(self._operations)
        self.is_open = False


class LateStream:
    """A stream that does nothing before somebody waits for it, as late as it may.

    On the compute stream, whose operations run when they are called, waiting is done at once.
    """

    def __init__(self, memory: torch.device = HOST, *, computes: bool = False) -> None:
        """`memory` is where `empty` takes its tensors from."""
        self.events: list[LateEvent] = []
        self.most = 0
        """Events that were open at a time."""
        self._memory = memory
        self._computes = computes
        self._operations: list[Callable[[], object]] = []
        self._ran = 0

    def record(self) -> LateEvent:
        self.events.append(LateEvent(self, len(self._operations)))
        self.most = max(self.most, sum(event.is_open for event in self.events))
        return self.events[-1]

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if self._computes:
            event.finish()
        else:
            self._operations.append(event.finish)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert not self._computes, "copies have streams of their own"
        self._operations.append(lambda: target.copy_(source))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._memory)

    def run(self, upto: int) -> None:
        while self._ran < upto:
            self._ran += 1
            self._operations[self._ran - 1]()


class HostMark:
    """A `Mark` of compute that has run when it is called."""

    def __init__(self) -> None:
        self._time: float | None = None

    def set(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        assert self._time is not None

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        assert self._time is not None and earlier._time is not None
        return self._time - earlier._time


class LateDevice:
    """A `Device` with memory of the host's, or of another device of torch's."""

    def __init__(self, memory: torch.device = HOST) -> None:
        self.kind = memory.type
        self.compute = LateStream(memory, computes=True)
        self.pinned_bytes = 0
        self._memory = memory

    def stream(self) -> LateStream:
        return LateStream(self._memory)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        return HostMark()


def gloo_backend(store: Store, rank: int, size: int, _max_ctas: int) -> Any:
    """A group of torch's that needs no GPU."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class BusyGpu(LateDevice):
    """A device whose work only takes time, on a clock that moves on request."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.busy_until = 0.0
        self.marks = 0
        """Marks made."""
        self.stands_still = False
        """Whether nothing that is enqueued from here on is ever reached."""

    def mark(self) -> Mark:
        self.marks += 1
        return BusyMark(self)

    def work(self, seconds: float) -> None:
        """Enqueue what keeps compute busy for a while."""
        self.busy_until = max(self.now, self.busy_until) + seconds


class BusyMark:
    def __init__(self, gpu: BusyGpu) -> None:
        self._gpu = gpu
        self._at = 0.0
        self._is_never_reached = False

    def set(self) -> None:
        self._at = max(self._gpu.now, self._gpu.busy_until)
        self._is_never_reached = self._gpu.stands_still

    def wait(self) -> None:
        still = self._gpu.stands_still and self._is_never_reached
        assert not still, "waits for a device that stands still"
        self._gpu.now = max(self._gpu.now, self._at)

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, BusyMark)
        return self._at - earlier._at


NAME = "pretend"
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch lets a device be written in Python (2.10 does)."""
MOVES = ("aten::copy_", "aten::_to_copy")
_MATH = 0
"""How torch numbers the attention that is made of plain operations."""
_library: list[torch.library.Library] = []


class PretendTensor(Tensor):
    """A tensor of the device; `host` has its contents."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as an instance's
        cls, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return _run(operation, arguments, named or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()


def pretend() -> torch.device:
    """The device; torch knows it from the first call on, for as long as the process lives."""
    if not _library:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        # torch's recomputation and fork_rng ask every device, also in later tests of the process.
        module = getattr(torch, NAME)
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        module.get_rng_state = lambda _: torch.get_rng_state()
        module.set_rng_state = lambda state, _: torch.set_rng_state(state)
        library = torch.library.Library("_", "IMPL")
        # Operations without a tensor among their arguments, which make one.
        library.fallback(
            lambda operation, *args, **named: _run(operation, args, named), "PrivateUse1"
        )
        # By itself torch makes an empty tensor here and has it grow, which these cannot.
        ranges = torch.library.Library("aten", "IMPL")
        for name in ("arange", "arange.start", "arange.start_step"):
            ranges.impl(name, _arange, "PrivateUse1")
        _library.extend((library, ranges))
    return torch.device(NAME, 0)


def _arange(*bounds: float, **named: Any) -> Tensor:
    del named["device"]
    return PretendTensor(torch.arange(*bounds, dtype=named.get("dtype")))


def _run(operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
    name = operation.name().partition(".")[0]
    given = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    if name not in MOVES:
        for tensor in given:
            if not isinstance(tensor, PretendTensor) and tensor.dim() > 0:
                raise RuntimeError(f"{name}: a tensor of the host among those of the device")
    if name == "aten::_fused_sdp_choice":
        return _MATH
    wanted = named.get("device")
    stays = wanted is None or torch.device(wanted).type == NAME
    named = {key: value for key, value in named.items() if key not in ("device", "pin_memory")}
    if wanted is not None:
        named["device"] = torch.device("cpu")
    made = operation(*tree_map(_host, arguments), **tree_map(_host, named))
    for tensor in given:
        if isinstance(tensor, PretendTensor):
            assert tensor.shape == tensor.host.shape, f"{name}: it changes the size of a tensor"
    known = {id(tensor.host): tensor for tensor in given if isinstance(tensor, PretendTensor)}
    if not stays or (name == "aten::copy_" and not isinstance(arguments[0], PretendTensor)):
        return made
    return tree_map(lambda leaf: _here(leaf, known), made)


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, PretendTensor) else leaf


def _here(leaf: Any, known: dict[int, PretendTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # What an operation changed in place is the tensor that it was given.
    return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf)


def on_host(launch: Launcher) -> Launcher:
    """A launcher for tensors of the CPU, given tensors of the device."""

    def launched(kernel: str, blocks: int, *arguments: Argument) -> None:
        launch(kernel, blocks, *map(_host, arguments))

    return launched
