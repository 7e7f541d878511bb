"""What a list of layers contains, found without spending memory on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from axsparse.errors import ConfigError
from axsparse.models.layer import Kind, Layer, Model
from axsparse.seeds import preserved_rng


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the model, dense."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    trained: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerInfo:
    """One layer of the model."""

    name: str
    kind: Kind
    parameters: tuple[ParameterInfo, ...]
    flops: float
    """Of one sample's forward pass."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Survey:
    """All layers of a model, in order, and its ties."""

    layers: Sequence[LayerInfo]
    ties: Mapping[str, str]
    """Global name of each second use of a weight → the first."""

    @property
    def num_params(self) -> int:
        """Parameters of the model, a tied weight once."""
        return sum(
            p.numel for layer in self.layers for p in layer.parameters if p.name not in self.ties
        )

    @property
    def counted(self) -> list[str]:
        """Trained tensors in model order, a tied weight once: those of the gradient norm."""
        return [
            p.name
            for layer in self.layers
            for p in layer.parameters
            if p.trained and p.name not in self.ties
        ]

    @property
    def flops(self) -> float:
        """Of one sample's forward pass through the model."""
        return sum(layer.flops for layer in self.layers)

    def layer_of(self, name: str) -> int:
        """The number of the layer that holds a parameter."""
        for number, layer in enumerate(self.layers):
            if any(parameter.name == name for parameter in layer.parameters):
                return number
        raise KeyError(name)


def survey(model: Model) -> Survey:
    """Look at every layer; ConfigError for duplicate names and ties that do not fit."""
    layers = [_survey_layer(layer) for layer in model.layers]
    if not layers:
        raise ConfigError("model: no layers; a model is a list of at least one")
    seen: dict[str, ParameterInfo] = {}
    names: set[str] = set()
    for layer in layers:
        if re.fullmatch(r"[A-Za-z0-9_.-]+", layer.name) is None:
            raise ConfigError(
                f"layer {layer.name!r}: names become file names; use letters, digits, '_', '-', '.'"
            )
        if layer.name in names:
            raise ConfigError(f"layer {layer.name}: two layers have this name; rename one")
        names.add(layer.name)
        for parameter in layer.parameters:
            if parameter.name in seen:
                raise ConfigError(
                    f"parameter {parameter.name}: two parameters have this global name; "
                    f"rename layer {layer.name}"
                )
            seen[parameter.name] = parameter
    if not any(parameter.trained for parameter in seen.values()):
        raise ConfigError("model: no parameter requires a gradient; there is nothing to train")
    ties = _ties(model, seen)
    _check_tied_starts(model, layers, ties)
    return Survey(layers, ties)


def _survey_layer(layer: Layer) -> LayerInfo:
    parameters = tuple(
        ParameterInfo(f"{layer.name}.{name}", tuple(p.shape), p.requires_grad)
        for name, p in _on_meta(layer).named_parameters()
    )
    numel = sum(parameter.numel for parameter in parameters)
    flops = 2.0 * numel if layer.flops is None else float(layer.flops)
    return LayerInfo(layer.name, layer.kind, parameters, flops)


def _on_meta(layer: Layer) -> nn.Module:
    """The module without memory; a layer that cannot be built so is built and thrown away."""
    with preserved_rng():
        try:
            try:
                with torch.device("meta"):
                    module = layer.build()
            except (NotImplementedError, RuntimeError):
                if layer.init is not None:
                    raise
                module = layer.build()
        except Exception as reason:
            raise ConfigError(
                f"layer {layer.name}: its build raised {type(reason).__name__}: "
                f"{' '.join(str(reason).split())}; mend the function that makes the module"
            ) from reason
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"layer {layer.name}: its build returned {type(module).__name__}; "
            "return a torch.nn.Module"
        )
    for child in module.modules():
        if isinstance(child, _NormBase) and child.track_running_stats:
            raise ConfigError(
                f"layer {layer.name}: {type(child).__name__} tracks running statistics, which "
                "replicas would keep apart; use track_running_stats=False, or LayerNorm"
            )
    return module


def _ties(model: Model, parameters: Mapping[str, ParameterInfo]) -> dict[str, str]:
    used: set[str] = set()
    for tie in model.ties:
        for name in (tie.first, tie.second):
            if name not in parameters:
                raise ConfigError(f"tie {tie.first} = {tie.second}: no parameter {name!r}")
            if name in used:
                raise ConfigError(
                    f"tie {tie.first} = {tie.second}: {name} is in two ties; "
                    "a weight may have two uses, not more"
                )
            used.add(name)
        first, second = parameters[tie.first], parameters[tie.second]
        if first.shape != second.shape or first.trained != second.trained:
            raise ConfigError(
                f"tie {tie.first} = {tie.second}: shapes {first.shape} and {second.shape}, trained "
                f"{first.trained} and {second.trained}; a tie joins two uses of one weight"
            )
    order = list(parameters)
    for tie in model.ties:
        if order.index(tie.first) > order.index(tie.second):
            raise ConfigError(
                f"tie {tie.first} = {tie.second}: the first use comes later in the model; swap them"
            )
    return {tie.second: tie.first for tie in model.ties}


def _check_tied_starts(model: Model, layers: Sequence[LayerInfo], ties: Mapping[str, str]) -> None:
    """Both uses of a weight start alike on whatever stage, which takes an `init` by name."""
    owners = {
        parameter.name: layer
        for layer, info in zip(model.layers, layers, strict=True)
        for parameter in info.parameters
    }
    for second, first in ties.items():
        uses = (owners[first], owners[second])
        if uses[0] is uses[1]:
            continue
        if None not in (uses[0].init, uses[1].init) and uses[0].init is not uses[1].init:
            raise ConfigError(
                f"tie {first} = {second}: layers {uses[0].name} and {uses[1].name} have two "
                "different `init`s, so that the uses would start differently; give both the same"
            )
        for layer in uses:
            if layer.init is None:
                raise ConfigError(
                    f"tie {first} = {second}: layer {layer.name} has no `init`, so that the two "
                    "uses would start differently on two stages; give both layers the same `init`"
                )
