"""One layer's compressed state: where things stand, what re-masking keeps, what it frees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_machine import randoms
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.state_bytes import StateBytes, StateFormat, TensorSize, tensor_bytes
from axsparse.samo.tensor_state import TensorState

DTYPES = [torch.float32, torch.bfloat16]
"""Types of weights and gradients."""
SHAPES = {"first": (3, 5), "second": (7, 4), "bias": (6,)}
HYPER = Hyper(step=1, learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
examples = settings(max_examples=25, deadline=None, derandomize=True)


def random_mask(seed: int, numel: int, density: float) -> Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density


def tensor_state(
    name: str,
    shape: Sequence[int],
    index: Index,
    *,
    dtype: torch.dtype,
    owner: TensorState | None = None,
) -> TensorState:
    if owner is not None:
        weight = nn.Parameter(owner.parameter.detach())
    else:
        weight = nn.Parameter(torch.zeros(*shape, dtype=dtype))
    return TensorState(name, weight, index, decays=len(shape) > 1, alias_of=owner)


def layer_state(tensors: Sequence[TensorState], *, dtype: torch.dtype) -> LayerState:
    return LayerState("layer", tensors, StateFormat(dtype, dtype, ("exp_avg", "exp_avg_sq")))


def filled_layer(masks: Mapping[str, Tensor | None], *, dtype: torch.dtype) -> LayerState:
    """A layer of the tensors in SHAPES that has trained one step; None is dense."""
    tensors = []
    for name, shape in SHAPES.items():
        mask = masks.get(name)
        index = FullIndex(math.prod(shape)) if mask is None else make_index(mask)
        tensors.append(tensor_state(name, shape, index, dtype=dtype))
    layer = layer_state(tensors, dtype=dtype)
    for number, tensor in enumerate(tensors):
        layer.optimizer_state.write_master(tensor, 0, randoms(tensor.kept, number))
        layer.accumulate(tensor, randoms(tensor.parameter.numel(), 9 + number))
    update([layer], ADAMW, HYPER, 1.0)
    return layer


def dense_state(layer: LayerState, name: str) -> dict[str, Tensor]:
    """Weight, master and moments of a tensor, scattered into zeros."""
    tensor = layer.by_full_name[name]
    kept = {
        "master": layer.master(name),
        **layer.optimizer_state.moments_of(tensor, 0, tensor.kept),
    }
    found = {"weight": tensor.weight_D.clone()}
    for kind, values in kept.items():
        found[kind] = torch.zeros(tensor.parameter.numel())
        found[kind][tensor.index.positions()] = values
    return found


def formula(layer: LayerState, *, dtype: torch.dtype) -> StateBytes:
    stored = StateFormat(dtype, dtype, ADAMW.moments)
    sizes = (
        TensorSize(tensor.parameter.numel(), tensor.kept, is_alias=tensor.alias_of is not None)
        for tensor in layer.tensors
    )
    return sum((tensor_bytes(size, stored) for size in sizes), StateBytes())


# -- masks ----------------------------------------------------------------------------------


@examples
@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.sampled_from(DTYPES),
)
def test_remasking_carries_kept_entries_over_exactly(
    seed: int, before: float, after: float, dtype: torch.dtype
) -> None:
    old = random_mask(seed, 28, before)
    new = random_mask(seed + 1, 28, after) & old
    layer = filled_layer({"first": random_mask(seed + 2, 15, 0.5), "second": old}, dtype=dtype)
    expected = {name: dense_state(layer, name) for name in SHAPES}
    for value in expected["second"].values():
        value[~new] = 0
    gradients = {name: layer.dense_gradient(name).view(-1) for name in SHAPES}
    gradients["second"][~new] = 0

    layer.remask("second", new)

    assert torch.equal(layer.by_full_name["second"].index.positions(), new.nonzero().view(-1))
    for name, values in expected.items():
        for kind, value in dense_state(layer, name).items():
            assert torch.equal(value, values[kind]), (name, kind)
    for name, gradient in gradients.items():
        assert torch.equal(layer.dense_gradient(name).view(-1), gradient), name
    assert layer.live_bytes() == formula(layer, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_remasking_frees_what_is_no_longer_kept(dtype: torch.dtype) -> None:
    layer = filled_layer({}, dtype=dtype)
    weights = {name: layer.by_full_name[name].parameter.data_ptr() for name in SHAPES}

    layer.remask("second", random_mask(1, 28, 0.25))

    kept = sum(tensor.kept for tensor in layer.tensors)
    assert kept < 15 + 28 + 6
    assert layer.gradient.untyped_storage().nbytes() == kept * dtype.itemsize
    buffers = [
        *layer.optimizer_state.moments_K.values(),
        *([] if layer.optimizer_state.master_K is None else [layer.optimizer_state.master_K]),
    ]
    for buffer in buffers:
        assert buffer.untyped_storage().nbytes() == buffer.itemsize * kept
    assert {name: layer.by_full_name[name].parameter.data_ptr() for name in SHAPES} == weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("same_layer", [True, False])
def test_an_alias_follows_its_remasked_owner_by_refitting(
    dtype: torch.dtype, same_layer: bool
) -> None:
    owner = tensor_state("a", (4, 5), FullIndex(20), dtype=dtype)
    bias = tensor_state("c", (3,), FullIndex(3), dtype=dtype)
    alias = tensor_state("b", (4, 5), FullIndex(20), dtype=dtype, owner=owner)
    own = layer_state([owner, alias, bias] if same_layer else [owner, bias], dtype=dtype)
    following = own if same_layer else layer_state([alias], dtype=dtype)
    own.optimizer_state.write_master(owner, 0, randoms(20, 1))
    mask = random_mask(2, 20, 0.3)

    own.remask("a", mask)
    following.refit()

    dense = randoms(20, 3)
    following.accumulate(alias, dense)
    assert alias.kept == int(mask.sum())
    assert torch.equal(following.gradient_of(alias), dense[mask].to(following.gradient.dtype))
    assert not alias.weight_D[~mask].any()
    for layer in {own, following}:
        assert layer.live_bytes() == formula(layer, dtype=dtype)
