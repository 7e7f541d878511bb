"""The global gradient norm, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.gradient_norm import clip_factor, global_norm, norm_partials
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState

SIZES = {"small": 3, "edge": BLOCK, "large": 2 * BLOCK + 5}
examples = settings(max_examples=50, deadline=None, derandomize=True)


def layer_with_gradients(dtype: torch.dtype = torch.float32) -> LayerState:
    tensors = [
        TensorState(name, nn.Parameter(torch.zeros(numel)), FullIndex(numel), decays=False)
        for name, numel in SIZES.items()
    ]
    layer = LayerState("layer", tensors, StateTypes(torch.float32, dtype))
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        layer.accumulate(tensor, torch.randn(tensor.kept, generator=generator))
    return layer


def exact_norm(gradient: Tensor) -> float:
    exact = math.sqrt(math.fsum(value * value for value in gradient.double().tolist()))
    return torch.tensor(exact, dtype=torch.float64).float().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_block_gives_one_partial_sum_of_squares(dtype: torch.dtype) -> None:
    layer = layer_with_gradients(dtype)

    partials = norm_partials([layer], SIZES)

    blocks = {name: len(values) for name, values in partials.items()}
    assert blocks == {"small": 1, "edge": 1, "large": 3}
    for name, values in partials.items():
        gradient = layer.gradient_of(layer.by_full_name[name]).double()
        for number, value in enumerate(values.tolist()):
            block = gradient[number * BLOCK : (number + 1) * BLOCK]
            assert value == pytest.approx(math.fsum(block.square().tolist()), rel=1e-14)
    assert global_norm(torch.cat(list(partials.values()))) == exact_norm(layer.gradient)


def test_only_tensors_that_are_named_and_first_uses_give_partials() -> None:
    assert list(norm_partials([layer_with_gradients()], ["edge", "elsewhere"])) == ["edge"]
    owner = TensorState("a", nn.Parameter(torch.zeros(4)), FullIndex(4), decays=False)
    alias = TensorState("b", owner.parameter, FullIndex(4), decays=False, alias_of=owner)
    layer = LayerState("layer", [owner, alias], StateTypes(torch.float32, torch.float32))

    assert list(norm_partials([layer], ["a", "b"])) == ["a"]


@pytest.mark.parametrize(
    ("value", "position"),
    [(math.inf, 0), (-math.inf, 2), (math.nan, BLOCK + 2), (math.inf, 3 * BLOCK + 7)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(
    value: float, position: int, dtype: torch.dtype
) -> None:
    layer = layer_with_gradients(dtype)
    layer.gradient[position] = value

    partials = torch.cat(list(norm_partials([layer], SIZES).values()))

    assert int((~torch.isfinite(partials)).sum()) == 1
    assert not math.isfinite(global_norm(partials))


@examples
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20),
    st.sampled_from([1e-3, 0.5, 1.0, 10.0, 1e4]),
)
def test_clipping_is_that_of_torch(values: list[float], clip_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    norm = exact_norm(parameter.grad)
    ours = parameter.grad * clip_factor(norm, clip_norm)

    torch.nn.utils.clip_grad_norm_([parameter], clip_norm)

    # Torch computes its norm in fp32, so that two roundings lie between the factors.
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=1e-30)


def test_gradients_below_the_limit_are_left_alone_and_zero_never_clips() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5, rel=1e-6)
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(2e-6, 1e-6) == pytest.approx(1 / 3, rel=1e-6)


def test_finite_gradients_however_large_give_finite_partials() -> None:
    layer = layer_with_gradients()
    layer.gradient.fill_(torch.finfo(torch.float32).max)

    partials = torch.cat(list(norm_partials([layer], SIZES).values()))

    assert bool(torch.isfinite(partials).all())
