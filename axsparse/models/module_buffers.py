"""The buffers of a module: their places, and which of them are running statistics; its modes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.errors import ConfigError

T = TypeVar("T")

_STATISTICS = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
"""Running statistics of torch's normalisations, and their start values."""

SMALL = 2**16
"""Bytes of a buffer up to which copies are cheap."""


@dataclass(frozen=True)
class BufferSlot:
    """The place of one buffer in a module."""

    name: str
    """Name within the module, such as "norm1.running_mean"."""
    owner: nn.Module
    """The submodule that registers the buffer."""
    key: str
    places: Sequence[tuple[nn.Module, str]] = field(compare=False)
    """All places where the module has the buffer."""

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now; a forward may replace it by another one."""
        buffer = self.owner._buffers[self.key]
        assert buffer is not None
        return buffer

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor, wherever it is, by another one, which gets its attributes."""
        now = self.tensor
        vars(tensor).update(vars(now))
        for owner, key in self.places:
            if owner._buffers[key] is now:
                owner._buffers[key] = tensor

    @property
    def persists(self) -> bool:
        """Whether the buffer is part of the state dict; if not, it is a cache."""
        return self.key not in self.owner._non_persistent_buffers_set

    @property
    def is_statistic(self) -> bool:
        """Whether it is a running statistic of one of torch's normalisations."""
        return isinstance(self.owner, _NormBase) and self.key in _STATISTICS

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() * self.tensor.element_size() <= SMALL

    def start(self) -> Tensor:
        """The start value of a running statistic, on the CPU."""
        tensor = self.tensor
        return torch.full(tensor.shape, _STATISTICS[self.key], dtype=tensor.dtype, device="cpu")


class BufferCopies:
    """Copies of buffers, from before a forward that may be computed again from the same contents.

    The first copies are of all buffers, and show which ones a forward changes. Later copies are of
    these, of small buffers, since a forward may begin to change a buffer at any time, and of those
    that it has begun to change since.
    """

    def __init__(self, slots: Sequence[BufferSlot], way: str) -> None:
        """`way` is the setting with which no forward is computed again."""
        self._slots = slots
        self._way = way
        self._changing: list[bool] | None = None
        """Which buffers a forward changes; None until the first one has shown them."""
        self._versions: list[int] = []
        """Torch's counts of writes to the buffers, as of the last `take`."""

    def take(self) -> list[tuple[BufferSlot, Tensor]]:
        """All buffers with their contents: a copy, or the tensor itself where none is needed."""
        changing = self._changing or [True] * len(self._slots)
        self._versions = [version(slot.tensor) for slot in self._slots]
        return [
            (slot, slot.tensor.clone() if changes or slot.is_small else slot.tensor)
            for slot, changes in zip(self._slots, changing, strict=True)
        ]

    def learn(self, before: Sequence[tuple[BufferSlot, Tensor]], *, is_repeated: bool) -> None:
        """Note which buffers a forward has changed since `take`. If the forward `is_repeated`,
        ConfigError for a buffer of the saved state that it has changed and that has no copy."""
        if self._changing is None:
            self._changing = [
                slot.is_statistic
                or version(slot.tensor) != seen
                or not bytes_of(slot.tensor.detach()).equal(bytes_of(old.detach()))
                for (slot, old), seen in zip(before, self._versions, strict=True)
            ]
        for number, ((slot, old), seen) in enumerate(zip(before, self._versions, strict=True)):
            # The old tensor of a slot that has another one has its contents still.
            is_written = slot.tensor is old and version(old) != seen
            self._changing[number] |= is_written
            if is_repeated and is_written and slot.persists:
                raise ConfigError(
                    f"buffer {slot.name!r} of {type(slot.owner).__name__}: a forward has begun "
                    "to write to it, and nothing has its earlier contents for computing this "
                    f"forward once more; write to it in every forward, or set {self._way}"
                )


def version(tensor: Tensor) -> int:
    """The number of writes to a tensor that torch has counted."""
    return -1 if tensor.is_inference() else tensor._version


def slots(module: nn.Module) -> list[BufferSlot]:
    """The places of all buffers of a module, in its order; a shared submodule counts once."""
    found: list[BufferSlot] = []
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, child in module.named_modules():
        for key, buffer in child._buffers.items():
            if buffer is not None:
                same = places.setdefault(id(buffer), [])
                same.append((child, key))
                name = f"{prefix}.{key}" if prefix else key
                found.append(BufferSlot(name, child, key, same))
    return found


def named_tensors(module: nn.Module, *, saved: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module, then its buffers, by name; if `saved`, only buffers that its
    state_dict has."""
    yield from module.named_parameters()
    for slot in slots(module):
        if slot.persists or not saved:
            yield slot.name, slot.tensor


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those with several names under each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def other_names(module: nn.Module) -> dict[str, str]:
    """The further names of the parameters and buffers that have several, each with the first."""
    first: dict[int, str] = {}
    firsts = {name: first.setdefault(id(tensor), name) for name, tensor in state_of(module)}
    return {name: known for name, known in firsts.items() if name != known}


def with_other_names(tensors: Mapping[str, T], others: Mapping[str, str]) -> dict[str, T]:
    """Tensors by name, and by `others`, names for which each is there under another one."""
    again = {name: tensors[first] for name, first in others.items() if first in tensors}
    return {**tensors, **{name: tensor for name, tensor in again.items() if name not in tensors}}


NOT_DENSE = (
    "which cannot be saved; keep what it is made of as dense buffers, and join them in forward"
)
"""The error, and the suggestion, for a buffer of another layout than torch's strided one."""


def reject_aliases(where: str, tensors: Mapping[str, Tensor]) -> None:
    """ConfigError for a trained parameter in the memory of another tensor, as an assignment to
    `.data` leaves it: in plain torch one follows the updates of the other, and copies do not."""
    found: dict[tuple[int, object], tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            place = tensor.untyped_storage()._cdata, tensor.storage_offset()
            first, other = found.setdefault(place, (name, tensor))
            if other is not tensor and (tensor.requires_grad or other.requires_grad):
                raise ConfigError(
                    f"{where}: {first} and {name} are two tensors in one memory; give both modules "
                    "one parameter, in place of its .data, or one of them a clone()"
                )


def switch_mode(layer: str, module: nn.Module, *, training: bool) -> None:
    """Set the module of a layer to training or to evaluation; ConfigError if a `train` of its own
    writes to a weight or saved buffer, as layers do that merge their weights for evaluations."""
    is_own = any(type(child).train is not nn.Module.train for child in module.modules())
    given = named_tensors(module, saved=True) if is_own else ()
    before = [(name, one, one.detach().clone()) for name, one in given]
    set_mode(module, training=training)
    now = dict(named_tensors(module, saved=True)) if is_own else {}
    for name, tensor, value in before:
        if now.get(name) is not tensor or not bytes_of(tensor.detach()).equal(bytes_of(value)):
            raise ConfigError(
                f"layer {layer}: its {'train' if training else 'eval'}() writes to {name!r}, and "
                "masters and checkpoints would not follow; compute with a changed copy in the "
                "forward (loralib: merge_weights=False)"
            )


def start_training(module: nn.Module, *, trains_all: bool = False) -> None:
    """Ask the modules with a `train` of their own for their modes, as a training loop does; modules
    that are in evaluation stay there, unless `trains_all`."""
    children = [*module.modules()]
    if trains_all or any(child.training and has_own_train(child) for child in children):
        resting = [child for child in children if not (child.training or trains_all)]
        set_mode(module, training=True)
        for child in resting:
            child.training = False


def set_mode(module: nn.Module, *, training: bool) -> None:
    """Set a module and all within it to training or to evaluation, as `module.train(mode)` does,
    but call no method `train(loader)`, which would train."""
    if has_own_train(module) or all(map(_is_mode, module.modules())):
        module.train(training)
        return
    module.training = training
    for child in module.children():
        set_mode(child, training=training)


def has_own_train(module: nn.Module) -> bool:
    """Whether a module has a `train(mode)` of its own; a method `train(loader)` is none."""
    return getattr(module.train, "__func__", None) is not nn.Module.train and _is_mode(module)


def _is_mode(module: nn.Module) -> bool:
    """Whether the `train` of a module sets its mode."""
    first = next(iter(inspect.signature(module.train).parameters.values()), None)
    if first is None or first.kind is first.KEYWORD_ONLY:
        return False
    return first.name in ("mode", "on", "training") or first.kind is first.VAR_POSITIONAL


def unfilled_attribute(module: nn.Module) -> str | None:
    """The path of a tensor without values, neither parameter nor buffer; None if there is none."""
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.is_meta:
                return f"{prefix}.{name}".lstrip(".")
    return None


@contextmanager
def replaced(values: Sequence[tuple[BufferSlot, Tensor]]) -> Iterator[None]:
    """Put other tensors in the places of buffers, and the original ones back at the end."""
    own = [(slot, slot.tensor) for slot, _ in values]
    for slot, value in values:
        slot.put(value)
    try:
        yield
    finally:
        for slot, tensor in own:
            slot.put(tensor)


@contextmanager
def same_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put the attributes and modes of modules and of all below them back afterwards."""
    before = [(child, dict(vars(child))) for module in modules for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes in before:
            now = vars(child)
            for name in now.keys() - attributes.keys():
                del now[name]
            for name, value in attributes.items():
                if now.get(name) is not value:
                    now[name] = value


def types_of_statistics(module: nn.Module) -> dict[str, torch.dtype]:
    """The type of the running statistics next to each parameter of a normalisation, by its name."""
    return {
        name: child.running_mean.dtype
        for prefix, child in module.named_modules()
        if isinstance(child, _NormBase) and child.running_mean is not None
        for name, _ in child.named_parameters(prefix, recurse=False)
    }
