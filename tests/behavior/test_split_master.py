"""Masters split into bf16 weight and remainder train bitwise as fp32 masters do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.exhaustive import by_default, each_once
from support.pruned import matrices
from support.runs import (
    assert_bitwise,
    random_init,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)
from torch import nn

from axsparse.config.load import load_config
from axsparse.config.validate import check_config
from axsparse.models.layer import Layer
from axsparse.runtime.errors import ConfigError
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import StateBytes


@pytest.mark.parametrize(
    ("layout", "at_step"), each_once([(1, 1), (2, 1), (2, 2)], [0, 3]), ids=str
)
def test_a_split_master_trains_bitwise_as_an_fp32_master(
    layout: tuple[int, int], at_step: int
) -> None:
    usual, split = (
        tiny_config(precision="bf16", samo={"split_master": on}, pruning={"at_step": at_step})
        for on in (False, True)
    )
    data = token_data()
    reference = train_in_process(*layout, tiny_gpt(usual), usual, data)

    ranks = train_in_process(*layout, tiny_gpt(split), split, data)

    for (ours, trace), (theirs, expected) in zip(ranks, reference, strict=True):
        assert_bitwise(trace, expected)
        for mine, other in zip(ours.parts.layers, theirs.parts.layers, strict=True):
            for tensor in mine.state.owned:
                masters = mine.state.master(tensor.name)
                assert torch.equal(masters, other.state.master(tensor.name))
                assert not torch.equal(masters, masters.bfloat16().float())
        assert 2 * ours.state_bytes().master == theirs.state_bytes().master


@pytest.mark.parametrize("steps", by_default([50], [50, 500]))
def test_many_steps_of_a_small_model_keep_weights_and_masters_bitwise(steps: int) -> None:
    usual, split = (
        tiny_config(
            model={"num_layers": 1, "hidden_size": 16, "sequence_length": 4},
            batch={"global_batch_size": 2, "microbatch_size": 2},
            precision="bf16",
            samo={"split_master": on},
            train={"steps": steps},
        )
        for on in (False, True)
    )
    data = token_data(length=4)
    [(theirs, expected)] = train_in_process(1, 1, tiny_gpt(usual), usual, data)

    [(ours, trace)] = train_in_process(1, 1, tiny_gpt(split), split, data)

    assert_bitwise(trace, expected)
    assert len(trace.losses) == steps
    for mine, other in zip(ours.parts.layers, theirs.parts.layers, strict=True):
        for tensor in mine.state.owned:
            assert torch.equal(mine.state.master(tensor.name), other.state.master(tensor.name))


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
