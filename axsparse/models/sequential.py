"""A model from an `nn.Sequential`, or any list of modules: each of them is a layer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from axsparse.models.layer import Kind, Layer, LossFunction, MetricFunction, Model
from axsparse.models.module_buffers import slots
from axsparse.runtime.errors import ConfigError

NO_METRICS: Mapping[str, MetricFunction] = {}
BY_PLACE: Mapping[str, Kind] = {}


def from_sequential(
    modules: nn.Sequential | Iterable[nn.Module],
    loss: LossFunction,
    *,
    kinds: Mapping[str, Kind] = BY_PLACE,
    metrics: Mapping[str, MetricFunction] = NO_METRICS,
    name: str = "sequential",
    example: Callable[[int], tuple[Tensor, ...]] | None = None,
) -> Model:
    """Modules that map a tensor or a tuple of tensors to the next one's input, as a model.

    Layers have the modules' names: those in the `nn.Sequential`, else "0", "1", …
    `loss`, `metrics` and `example` are those of `Model`. `kinds` says by name what is not so: an
    `nn.Embedding` is an embedding, the last module with parameters is the head, all others
    are blocks.

    The model starts at the modules' own values; the modules stay as they are. Those made
    under `torch.device("meta")` cost no memory: then every stage starts its own layers as
    torch would, from the run's seed.

    Raises ConfigError if modules share parameters, if some are on the meta device and some
    are not, or if a module there cannot start by itself.
    """
    layers = _by_name(modules)
    for layer in kinds:
        if layer not in layers:
            raise ConfigError(
                f"sequential: kinds names {layer!r}, and the modules are {', '.join(layers)}; "
                "choose one of them"
            )
        if kinds[layer] not in get_args(Kind):
            raise ConfigError(
                f"sequential: kinds says that {layer!r} is {kinds[layer]!r}; choose one of "
                f"{', '.join(get_args(Kind))}"
            )
    _refuse_shared(layers)
    full = [layer for layer, module in layers.items() if any(True for _ in module.parameters())]
    starts_itself = _on_meta(layers)
    found = []
    for layer, module in layers.items():
        by_place: Kind = "head" if layer in full[-1:] else "block"
        found.append(
            Layer(
                layer,
                partial(_started if starts_itself else _structure, module),
                kind=kinds.get(
                    layer, "embedding" if isinstance(module, nn.Embedding) else by_place
                ),
            )
        )
    start = None if starts_itself else OwnValues(layers)
    return Model(found, loss, name=name, metrics=metrics, start=start, example=example)


class OwnValues:
    """`StartValues` that are those of modules in memory."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._tensors = {
            f"{layer}.{name}": tensor
            for layer, module in layers.items()
            for name, tensor in _tensors(module)
        }
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        self.fingerprint = f"modules {digest.hexdigest()}"

    def read(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.detach().cpu()


def _by_name(modules: nn.Sequential | Iterable[nn.Module]) -> dict[str, nn.Module]:
    if not isinstance(modules, Iterable):
        raise ConfigError(
            f"sequential: {type(modules).__name__} is no list; give an nn.Sequential or a list of "
            "modules"
        )
    # A Sequential's named_children() leaves out what stands in it for a second time.
    named = (
        modules._modules.items()
        if isinstance(modules, nn.Sequential)
        else ((str(number), module) for number, module in enumerate(modules))
    )
    layers: dict[str, nn.Module] = {}
    for layer, module in named:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"sequential: {layer} is {type(module).__name__}; give torch.nn.Modules, "
                "a function as the forward of one"
            )
        layers[layer] = module
    return layers


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name within the module."""
    yield from module.named_parameters()
    yield from ((slot.name, slot.tensor) for slot in slots(module))


def _refuse_shared(layers: Mapping[str, nn.Module]) -> None:
    users: dict[int, str] = {}
    for layer, module in layers.items():
        for name, tensor in _tensors(module):
            user = users.setdefault(id(tensor), layer)
            if user != layer:
                raise ConfigError(
                    f"sequential: {user} and {layer} share {name}, and could stand on two stages; "
                    "give each its own, or write the model as Layers with a Tie"
                )


def _on_meta(layers: Mapping[str, nn.Module]) -> bool:
    """Whether the modules are empty; ConfigError if only some are, or cannot start themselves."""
    places = {
        layer: {tensor.is_meta for _, tensor in _tensors(module)}
        for layer, module in layers.items()
    }
    if not any(True in found for found in places.values()):
        return False
    for layer, found in places.items():
        if False in found:
            raise ConfigError(
                f"sequential: {layer} has values and other modules are on the meta device; "
                "make all of them under torch.device('meta'), or none"
            )
        for child in layers[layer].modules():
            if next(_owned(child), None) is not None and _reset(child) is None:
                raise ConfigError(
                    f"sequential: {layer} is on the meta device and {type(child).__name__} has no "
                    "reset_parameters; write one, or make the modules with their values"
                )
    return True


def _owned(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module without those of its children."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """What gives a module's own tensors their start values, by torch's custom."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _structure(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, made without copying what it holds."""
    empty: dict[int, Tensor] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    empty.update((id(buffer), buffer.detach().to("meta")) for buffer in module.buffers())
    return copy.deepcopy(module, empty)


def _started(module: nn.Module) -> nn.Module:
    """A copy with start values of its own, on torch's default device."""
    made = _structure(module).to_empty(device=torch.empty(0).device)
    # Outermost last, as they are constructed: a module may change what its children began with.
    for child in reversed(list(made.modules())):
        reset = _reset(child)
        if reset is not None:
            reset()
    return made
