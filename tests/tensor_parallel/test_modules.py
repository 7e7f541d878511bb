"""Sharded layers compute what the plain module with the full weights computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.runs import on_ranks
from torch import Tensor, nn

from axsparse.models.layer import Layer, TpStyle
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.samo.layer_construction import StateOptions, build_layers, full_weights
from axsparse.samo.state_bytes import StateFormat
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.modules import Sharding


class Mlp(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(6, 24), inner(), nn.Linear(24, 6)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Any:
        return x + self.scale * self.down(self.inner(self.up(x)))


PLAN = {"up": "colwise", "down": "rowwise"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "an activation": (nn.GELU, PLAN),
    "packed": (partial(nn.GLU), {"up": TpStyle("colwise", packed=2), "down": "rowwise"}),
    "replicated": (nn.PReLU, {**PLAN, "inner": "replicated"}),
    "gathered": (partial(nn.LayerNorm, 24), {"up": "gather_output", "down": "rowwise"}),
    "rowwise alone": (nn.Tanh, {"down": "rowwise"}),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_full_module(name: str, ranks: int) -> None:
    inner, plan = CASES[name]

    def build() -> nn.Module:
        module = Mlp(inner)
        if name == "packed":
            module.down = nn.Linear(12, 6)
        return module

    def on_rank(transport: Transport) -> None:
        group = TensorGroup(Grid(1, 1, ranks).coords(transport.rank), transport)
        sharding = Sharding(group)
        types = StateFormat(torch.float32, torch.float32)
        options = StateOptions(types, 1, None, sharding=sharding)
        [built] = build_layers([Layer("mlp", build, tp_plan=plan)], {}, options)
        full = build()
        full.load_state_dict(dict(full_weights(built)), strict=False)
        found = []
        for module in (built.module, full):
            x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            assert x.grad is not None
            found.append((y.detach(), x.grad))
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected)
        for local, parameter in full.named_parameters():
            tensor = next(t for t in built.state.tensors if t.full_name == f"mlp.{local}")
            assert parameter.grad is not None and tensor.parameter.grad is not None
            gathered = built.state.gathered(tensor, tensor.parameter.grad)
            torch.testing.assert_close(gathered, parameter.grad)

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (RuntimeError("The size of tensor a (12) must match the size of tensor b (24)"), True),
        (IndexError("index 20 is out of bounds for dimension 1 with size 12"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), False),
    ],
)
def test_shapes_that_do_not_fit_are_told_of_a_sharded_layer_and_other_errors_stay(
    error: Exception, is_told: bool
) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    def on_rank(transport: Transport) -> Any:
        group = TensorGroup(Grid(1, 1, 2).coords(transport.rank), transport)
        module = Mlp(Failing)
        Sharding(group).shard(Layer("mlp", lambda: module, tp_plan=PLAN), module)
        with pytest.raises((ConfigError, type(error))) as raised:
            module.to_empty(device="cpu")(torch.ones(4, 6))
        return raised.value

    for raised in on_ranks(2, on_rank):
        assert raised is error if not is_told else str(raised).startswith("layer mlp: sharded (")
