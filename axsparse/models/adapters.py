"""Adapters that keep the zeros of pruned matrices: low-rank changes of the kept entries.

A matrix W, which stays as it is, multiplies as

    W + [W ≠ 0] · (B A)        W: (out, in), B: (out, rank), A: (rank, in)

and B and A are trained. The sum is computed in fp32 and rounded once. Only entries that are not
zero change, so that a merged matrix has the zeros of the pruned one. A begins with entries of
variance 1 / rank and B with zeros: at first an optimizer that moves entries of B by its learning
rate moves entries of the matrix by about as much, as if it trained the matrix. (Adapters without
the mask are from "LoRA", Hu et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.models.layer import InitFunction, Layer, Model
from axsparse.runtime.errors import ConfigError

INNER, OUTER = "adapter_in", "adapter_out"
"""The parameters A and B of a linear layer."""


def with_adapters(model: Model, matrices: Collection[str], rank: int) -> Model:
    """The model in which the matrices of these global names have adapters.

    In addition to the adapters only vectors are trained, such as norms and biases; all matrices are
    frozen. ConfigError for a matrix that is no weight of a plain linear layer, when its layer is
    built.
    """
    return replace(model, layers=[_adapted(layer, matrices, rank) for layer in model.layers])


def merged(weight: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """The matrix with its adapter, in the type of the matrix; zeros are where they were."""
    before = weight.float()
    after = before + outer.float() @ inner.float()
    # An entry that would cancel to zero keeps its value.
    return torch.where((before == 0) | (after == 0), before, after).to(weight.dtype)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; `_adapt` makes it of a plain one."""

    adapter_in: nn.Parameter
    adapter_out: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The output of a linear layer with the merged matrix."""
        weight = merged(self.weight, self.adapter_in, self.adapter_out)
        return F.linear(input, weight, self.bias)


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
                    _adapt(full, child, rank)
        return module

    draw = layer.init
    return replace(layer, build=build, init=None if draw is None else _init(draw))


def _init(draw: InitFunction) -> InitFunction:
    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        last = name.rpartition(".")[2]
        if last == OUTER:
            return torch.zeros(shape)
        if last == INNER:
            return torch.randn(shape, generator=generator).mul_(float(shape[0]) ** -0.5)
        return draw(name, shape, generator)

    return init


def _adapt(name: str, linear: nn.Module, rank: int) -> None:
    """Give a linear layer an adapter, in place."""
    if type(linear) is not nn.Linear or not name.endswith(".weight"):
        raise ConfigError(
            f"--heal adapters: {name} is the weight of no plain linear layer; name it in "
            "pruning.exclude, or choose another way to heal"
        )
    linear.__class__ = AdaptedLinear
    inner = torch.randn(rank, linear.in_features) * rank**-0.5
    linear.register_parameter(INNER, nn.Parameter(inner))
    linear.register_parameter(OUTER, nn.Parameter(torch.zeros(linear.out_features, rank)))
