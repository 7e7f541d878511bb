"""A torch device that is none: memory of the CPU behind tensors that belong elsewhere.

Tensors of this device compute as on the CPU, and as on a GPU torch refuses to mix both. So a line
that forgot where its tensors live fails here as it would there. Time is not pretended: every
operation has run when its call returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from axsparse.samo.cuda.launch import Argument, Launcher

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
        # torch's recomputation asks every device for these, also in later tests of the process.
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
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
