"""The modules of a model as a run starts with them."""

from __future__ import annotations

import torch
from torch import nn

from axsparse.models.layer import Model
from axsparse.runtime.seeds import keyed_generator


def built_modules(model: Model) -> list[nn.Module]:
    """The modules of all layers, with their start values."""
    built = []
    for layer in model.layers:
        module = layer.build()
        for name, parameter in module.named_parameters():
            assert layer.init is not None
            generator = keyed_generator(1, layer.name, name)
            with torch.no_grad():
                parameter.copy_(layer.init(name, tuple(parameter.shape), generator))
        built.append(module)
    return built
