"""What re-masking frees of a layer's compressed state."""

from __future__ import annotations

import pytest
import torch
from support.kernel_contract import state_of

from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import StateFormat

SHAPES = {"first": (3, 5), "second": (7, 4), "bias": (6,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_remasking_frees_what_is_no_longer_kept(dtype: torch.dtype) -> None:
    masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    layer = state_of(masks, StateFormat(dtype, dtype, ADAMW.moments))
    places = {tensor.name: tensor.parameter.data_ptr() for tensor in layer.tensors}

    layer.remask("second", torch.arange(28) % 4 == 0)

    kept = sum(tensor.kept for tensor in layer.tensors)
    assert kept == 15 + 7 + 6
    assert layer.gradient.untyped_storage().nbytes() == kept * dtype.itemsize
    buffers = layer.optimizer_state.stored().tensors
    assert len(buffers) >= 2
    for buffer in buffers:
        assert buffer.untyped_storage().nbytes() == buffer.itemsize * kept
    assert {t.name: t.parameter.data_ptr() for t in layer.tensors} == places
