"""What re-masking frees of a layer's compressed state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from axsparse.samo.index.base import FullIndex
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState

SHAPES = {"first": (3, 5), "second": (7, 4), "bias": (6,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_remasking_frees_what_is_no_longer_kept(dtype: torch.dtype) -> None:
    weights = {
        name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()
    }
    places = {name: weight.data_ptr() for name, weight in weights.items()}
    tensors = [
        TensorState(name, weight, FullIndex(math.prod(SHAPES[name])), decays=True)
        for name, weight in weights.items()
    ]
    layer = LayerState("layer", tensors, StateFormat(dtype, dtype, ADAMW.moments))

    layer.remask("second", torch.arange(28) % 4 == 0)

    kept = sum(tensor.kept for tensor in layer.tensors)
    assert kept == 15 + 7 + 6
    assert layer.gradient.untyped_storage().nbytes() == kept * dtype.itemsize
    buffers = [
        *layer.optimizer_state.moments_K.values(),
        *([] if layer.optimizer_state.master_K is None else [layer.optimizer_state.master_K]),
    ]
    assert len(buffers) >= 2
    for buffer in buffers:
        assert buffer.untyped_storage().nbytes() == buffer.itemsize * kept
    assert {t.name: t.parameter.data_ptr() for t in layer.tensors} == places
