"""Refuses parameters that cannot be trained and buffers that cannot be saved, by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from axsparse.models.layer import Layer
from axsparse.models.module_buffers import slots
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.files.safetensors import can_be_stored


def refuse_parameters(layer: Layer, module: nn.Module) -> None:
    """Raise ConfigError for parameters that cannot be trained."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"layer {layer.name}: parameter {name!r} has no shape yet; give its module all "
                "sizes, instead of a lazy one"
            )
        if not parameter.is_floating_point():
            raise ConfigError(
                f"layer {layer.name}: parameter {name!r} is {parameter.dtype}; parameters are real "
                "floating point: keep complex numbers as torch.view_as_real makes them, integers "
                "as a buffer"
            )
        if not can_be_stored(parameter):
            kind = parameter.dtype if parameter.layout == torch.strided else parameter.layout
            raise ConfigError(
                f"layer {layer.name}: parameter {name!r} is {kind}, which has no dense values of "
                "the run's precision; make it dense, of numbers of at least a byte"
            )


def refuse_buffers(layer: Layer, module: nn.Module) -> None:
    """Raise ConfigError for buffers that no checkpoint could hold."""
    for slot in slots(module):
        tensor = slot.tensor
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"layer {layer.name}: buffer {slot.name!r} is {tensor.layout}, which cannot be "
                "saved; keep its indices and values as buffers, and join them in forward"
            )
        if slot.persists and not can_be_stored(tensor):
            raise ConfigError(
                f"layer {layer.name}: buffer {slot.name!r} is {tensor.dtype}, which cannot be "
                "saved; keep it as integers, or register it with persistent=False and make it "
                "anew in build"
            )
