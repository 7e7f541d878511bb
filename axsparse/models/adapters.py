"""Adapters that keep the zeros of pruned matrices: low-rank changes of the kept entries.

A matrix W, which stays as it is, multiplies as

    W + [W ≠ 0] · (B A)        W: (out, in), B: (out, rank), A: (rank, in)

or for each of a stack, (experts, out, in) or (experts, in, out),
and B and A are trained. The sum is computed in fp32 and rounded once. Only entries that are not
zero change, so that a merged matrix has the zeros of the pruned one. A begins with entries of
variance 1 / rank and B with zeros: at first an optimizer that moves entries of B by its learning
rate moves entries of the matrix by about as much, as if it trained the matrix. (Adapters without
the mask are from "LoRA", Hu et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.models.layer import InitFunction, Layer, Model
from axsparse.runtime.errors import ConfigError

INNER, OUTER = "adapter_in", "adapter_out"
"""The ends of the names of A and B, which begin with the name of their matrix."""


def with_adapters(model: Model, matrices: Collection[str], rank: int) -> Model:
    """The model in which the matrices of these global names have adapters.

    In addition to the adapters only vectors are trained, such as norms and biases; all matrices are
    frozen. ConfigError, when its layer is built, for a matrix that is no weight of a linear layer
    or of experts.
    """
    return replace(model, layers=[_adapted(layer, matrices, rank) for layer in model.layers])


def merged(weight: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """The matrix with its adapter, in the type of the matrix; zeros are where they were."""
    before = weight.float()
    after = before + outer.float() @ inner.float()
    # An entry that would cancel to zero keeps its value.
    return torch.where((before == 0) | (after == 0), before, after).to(weight.dtype)


class Adapted(nn.Module):
    """Base class of modules some of whose matrices have adapters; `_adapt` makes them of others."""

    adapted: tuple[str, ...] = ()
    """The names of the matrices."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module with merged matrices."""
        own: dict[str, Any] = self._parameters
        before = {name: own[name] for name in self.adapted}
        for name, weight in before.items():
            own[name] = merged(weight, own[f"{name}_{INNER}"], own[f"{name}_{OUTER}"])
        try:
            return super().forward(*args, **kwargs)
        finally:
            own.update(before)


def _adapted(layer: Layer, matrices: Collection[str], rank: int) -> Layer:
    def build() -> nn.Module:
        module = layer.build()
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                parameter.requires_grad = False
        for path, child in list(module.named_modules()):
            for name, _ in list(child.named_parameters(recurse=False)):
                full = layer.full_name(f"{path}.{name}".lstrip("."))
                if full in matrices:
                    _adapt(full, child, name, rank)
        return module

    draw = layer.init
    return replace(layer, build=build, init=None if draw is None else _init(draw))


def _init(draw: InitFunction) -> InitFunction:
    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name.endswith(OUTER):
            return torch.zeros(shape)
        if name.endswith(INNER):
            return torch.randn(shape, generator=generator).mul_(float(shape[-2]) ** -0.5)
        return draw(name, shape, generator)

    return init


def _adapt(full: str, module: nn.Module, name: str, rank: int) -> None:
    """Give a matrix of a module, or each of a stack, an adapter, in place."""
    weight = module.get_parameter(name)
    if not isinstance(module, nn.Linear) and not hasattr(module, "input_dim"):
        raise ConfigError(
            f"--heal adapters: {full} is the weight of no linear layer, and of no experts; name "
            "it in pruning.exclude, or choose another way to heal"
        )
    if not isinstance(module, Adapted):
        kind = type(module)
        module.__class__ = type(f"Adapted{kind.__name__}", (Adapted, kind), {})
    vars(module)["adapted"] = (*vars(module).get("adapted", ()), name)
    *experts, first, last = weight.shape
    inner = torch.randn(*experts, rank, last) * rank**-0.5
    module.register_parameter(f"{name}_{INNER}", nn.Parameter(inner))
    outer = torch.zeros(*experts, first, rank)
    module.register_parameter(f"{name}_{OUTER}", nn.Parameter(outer))
