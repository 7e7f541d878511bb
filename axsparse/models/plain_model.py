"""A model as one module of plain torch, with weights in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from axsparse.models.layer import Model, on_meta
from axsparse.models.module_buffers import slots
from axsparse.runtime.errors import ConfigError


class PlainModel(nn.Sequential):
    """The modules of all layers in order, by the names of the layers."""

    def forward(self, *inputs: Tensor) -> Any:
        """What the last layer returns, a tensor or a tuple, for the inputs of the first."""
        output: Any = inputs
        for module in self:
            output = module(*output) if isinstance(output, (tuple, list)) else module(output)
        return output


def refuse_dotted_names(model: Model) -> None:
    """ConfigError for a layer whose name no submodule of torch can have."""
    for layer in model.layers:
        if "." in layer.name:
            raise ConfigError(
                f"layer {layer.name}: torch's modules have no dots in their names; name it "
                "otherwise, or take trainer.state_dict()"
            )


def plain_model(
    model: Model, ties: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> nn.Sequential:
    """The model with these parameters and buffers, in evaluation mode; a `PlainModel`, or a copy of
    the model's container with other children.

    `tensors` has all of them by global name, a tied weight under the name of its first use, which
    both uses then share. `ties` maps second uses to first ones.
    """
    made = PlainModel()
    owners: dict[str, nn.Parameter] = {}
    for layer in model.layers:
        module = on_meta(layer)
        for slot in slots(module):
            slot.put(tensors[f"{layer.name}.{slot.name}"])
        filled: dict[int, nn.Parameter] = {}
        for local, empty in module.named_parameters():
            name = f"{layer.name}.{local}"
            owner = ties.get(name, name)
            if owner not in owners:
                owners[owner] = nn.Parameter(tensors[owner], empty.requires_grad)
            filled[id(empty)] = owners[owner]
        for child in module.modules():  # a parameter may stand in several of them
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    child._parameters[key] = filled[id(parameter)]
        made.add_module(layer.name, module)
    if model.container is None:
        return made.eval()
    own = copy.copy(model.container)
    vars(own)["_modules"] = made._modules
    return own.eval()
