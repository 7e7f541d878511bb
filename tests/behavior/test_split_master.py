"""Masters split into bf16 weight and remainder; that they train as fp32 ones, the table says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.pruned import matrices
from support.runs import random_init
from torch import nn

from axsparse.config.load import load_config
from axsparse.config.validate import check_config
from axsparse.models.layer import Layer
from axsparse.runtime.errors import ConfigError
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import StateBytes


def test_a_mask_that_changes_keeps_split_masters_exactly_and_grows_zeros() -> None:
    layer = Layer("a", partial(nn.Linear, 30, 20, bias=False), init=random_init)
    options = StateOptions(
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        moments=ADAMW.moments,
        seed=1,
        masks=matrices([layer], 0.5),
        split_master=True,
    )
    [built] = build_layers([layer], {}, options)
    state, [tensor] = built.state, built.state.owned
    before = torch.zeros(600)
    before[tensor.index.positions()] = state.master("a.weight")
    mask = torch.zeros(600, dtype=torch.bool)
    mask[torch.randperm(600, generator=torch.Generator().manual_seed(2))[:200]] = True

    state.remask("a.weight", mask)

    assert torch.equal(state.master("a.weight"), before[mask])
    assert tensor.weight_D[~mask].count_nonzero() == 0
    index = make_index(mask, "int32").nbytes
    assert state.live_bytes() == StateBytes(1200, index, 400, 400, 1600)


def test_only_bf16_weights_are_the_upper_half_of_a_master() -> None:
    loaded = load_config(None, ["samo.split_master=true", "precision=fp16"])

    with pytest.raises(ConfigError) as told:
        check_config(loaded)

    assert str(told.value) == (
        "samo.split_master (--set): fp16 weights are not the upper half of fp32 masters; "
        "choose precision bf16, or false"
    )
