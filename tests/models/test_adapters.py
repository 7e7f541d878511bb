"""Adapters of pruned matrices: what they change, and what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import mlp, random_init
from torch import nn

from axsparse.models.adapters import Adapted, merged, with_adapters
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.runtime.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_and_no_others_appear(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, -3.0, 4.0]], dtype=dtype)
    inner, outer = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[-1.0], [0.5]])

    found = merged(weight, inner, outer)

    # The first entry would cancel, and stays.
    assert found.dtype == dtype
    assert found.tolist() == [[1.0, 0.0, 1.0], [0.0, -2.5, 4.5]]


def test_the_forward_is_that_of_the_merged_matrix_and_matrices_are_frozen() -> None:
    model = with_adapters(mlp(), ["hidden1.0.weight"], rank=2)
    module = model.layers[1].build()
    linear: Any = module.get_submodule("0")
    assert {Adapted, nn.Linear} <= {*type(linear).__mro__}
    x = torch.randn(5, linear.in_features)
    plain = nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(linear(x), plain)  # it begins as it was

    with torch.no_grad():
        linear.weight[:, ::2] = 0
        linear.weight_adapter_out.normal_()
    module(x).sum().backward()

    change = (linear.weight != 0) * (linear.weight_adapter_out @ linear.weight_adapter_in)
    expected = nn.functional.linear(x, linear.weight + change, linear.bias)
    torch.testing.assert_close(linear(x), expected)
    assert linear.weight_adapter_in.grad is not None
    assert linear.weight.grad is None
    assert linear.bias.grad is not None
    assert not any(p.requires_grad for p in model.layers[0].build().parameters() if p.dim() > 1)


def test_start_values_are_those_of_the_layer_and_of_the_adapter() -> None:
    layers = [Layer(one.name, one.build, init=random_init) for one in mlp().layers]
    model = with_adapters(Model(layers, mlp().loss, name="mlp"), ["hidden0.0.weight"], rank=4)
    init = model.layers[0].init
    assert init is not None

    def draw(name: str, *shape: int) -> torch.Tensor:
        return init(name, shape, torch.Generator().manual_seed(1))

    shapes = {p.name: p.shape for p in profile(model).layers[0].parameters}
    assert {"hidden0.0.weight_adapter_in", "hidden0.0.weight_adapter_out"} <= shapes.keys()
    assert torch.equal(draw("0.weight_adapter_out", 8, 4), torch.zeros(8, 4))
    assert float(draw("0.weight_adapter_in", 4, 1000).std()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(
        draw("0.weight", 8, 4), random_init("0.weight", (8, 4), torch.Generator().manual_seed(1))
    )


class Experts(nn.Module):
    """Two experts, each with some of the tokens; inputs come before outputs."""

    input_dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 4, 3))
        self.down = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up).relu() @ self.down


def test_experts_have_an_adapter_each() -> None:
    layer = Layer("one", lambda: nn.Sequential(Experts()))
    module = with_adapters(Model([layer], mlp().loss), ["one.0.up", "one.0.down"], 2).layers[0]
    experts: Any = module.build().get_submodule("0")
    with torch.no_grad():
        experts.up[:, ::2] = 0
        experts.up_adapter_out.normal_()
        experts.down_adapter_out.normal_()
    x = torch.randn(2, 5, 4)

    experts(x).sum().backward()

    up, down = (
        weight + (weight != 0) * torch.stack([o @ i for o, i in zip(outer, inner, strict=True)])
        for weight, outer, inner in (
            (experts.up, experts.up_adapter_out, experts.up_adapter_in),
            (experts.down, experts.down_adapter_out, experts.down_adapter_in),
        )
    )
    torch.testing.assert_close(experts(x), (x @ up).relu() @ down)
    assert experts.up_adapter_in.grad.abs().sum() > 0
    assert experts.up.grad is None
    assert isinstance(experts.up, nn.Parameter)  # and not the merged one


def test_other_matrices_than_those_of_linear_layers_are_refused_by_name() -> None:
    layer = Layer("one", lambda: nn.Sequential(nn.Conv1d(2, 3, 1)))
    model = with_adapters(Model([layer], mlp().loss), ["one.0.weight"], rank=2)

    with pytest.raises(ConfigError, match=r"one\.0\.weight is the weight of no linear layer, and"):
        model.layers[0].build()
