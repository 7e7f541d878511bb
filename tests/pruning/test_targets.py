"""Which tensors are pruned, by their names, and by the zeros that other tools leave in a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf import SMALL_LLAMA, write_llama
from support.runs import summed_loss, tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.models.zoo.model_registry import named_model
from axsparse.pruning.targets import find_targets, pruning_lines
from axsparse.runtime.errors import ConfigError

DENSE = "model.layers.1.mlp.down_proj.weight"
"""A tensor that the other tool has left as it was."""


def pruned(name: str, tensor: Tensor) -> Tensor:
    """A tensor with its first two of every four inputs at zero, if the other tool prunes it."""
    if tensor.dim() == 1 or not name.startswith("model.layers") or name == DENSE:
        return tensor
    tensor.view(-1, 4)[:, :2] = 0.0
    return tensor


def config_of(folder: Path, **pruning: Any) -> Config:
    return tiny_config(
        **{
            "model": {**SMALL_LLAMA, "from": str(folder)},
            "pruning": {"method": "zeros", "sparsity": 0.45, **pruning},
            "batch": {"global_batch_size": 4, "microbatch_size": 1},
            "train": {"steps": 3},
        }
    )


def model_of(config: Config) -> Model:
    return named_model(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_llama(tmp_path, pruned)
    return tmp_path


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in [(1, 1), (3, 1)]), (2, 2)],
)
def test_entries_that_are_zero_stay_zero_and_all_others_are_trained(
    folder: Path, layout: tuple[int, int]
) -> None:
    before = write_llama(folder, pruned)
    config = config_of(folder)

    ranks = train_in_process(*layout, model_of(config), config, token_data())

    seen = set()
    for trainer, trace in ranks:
        for name, weight in trace.weights.items():
            stays = before[name] != 0
            assert torch.equal(weight != 0, stays), name
            assert not torch.equal(weight, before[name])
            seen.add(name)
        for layer in trainer.layers:
            for tensor in layer.state.owned:
                stays = before[tensor.name] != 0
                assert tensor.kept == int(stays.sum()), tensor.name
                assert (tensor.index.nbytes > 0) == (not stays.all()), tensor.name
    assert seen == before.keys()


def test_a_pattern_is_checked_and_sparsity_need_not_be_said(folder: Path) -> None:
    config = config_of(folder, pattern="2:4", sparsity=0.9, exclude=[DENSE])
    train_in_process(2, 1, model_of(config), config, token_data())

    weights = write_llama(folder, pruned)
    groups = int((weights[DENSE].view(-1, 4) != 0).all(1).sum())
    config = config_of(folder, pattern="2:4")
    assert refusal(config) == (
        f"pruning.pattern: 2:4, but {groups} groups of 4 in {DENSE} have more than 2 entries that "
        "are not zero; leave the pattern out, or name the tensor in pruning.exclude"
    )


def refusal(config: Config, g_inter: int = 2) -> str:
    """The error that all ranks raise alike."""
    model = model_of(config)
    with pytest.raises(ConfigError) as caught:
        train_in_process(g_inter, 1, model, config, token_data())
    assert caught.value.on_all_ranks
    return str(caught.value)


def test_another_sparsity_than_planned_is_told_with_the_right_one(folder: Path) -> None:
    assert refusal(config_of(folder, sparsity=0.9)) == (
        "pruning.sparsity: 0.9, with which the run was planned, but 0.4518 of the loaded weights "
        "is zero; set it to 0.45"
    )


def test_the_sparsity_that_gradual_pruning_rises_from_is_that_of_the_zeros(folder: Path) -> None:
    rising = {"method": "gradual", "sparsity": 0.9, "initial_sparsity": 0.6, "interval": 1}
    layers = {"layers": ["*.up_proj.weight=0.45", f"{DENSE}=0.0"]}

    assert refusal(config_of(folder, **rising)) == (
        "pruning.initial_sparsity: 0.6, with which the run was planned, but 0.4518 of the loaded "
        "weights is zero; set it to 0.45"
    )
    assert refusal(config_of(folder, **rising, **layers)).endswith("set it to 0.56")
    write_llama(folder)
    assert refusal(config_of(folder, **rising)) == (
        "pruning.initial_sparsity: 0.6, but no pruned tensor of the loaded weights has a zero; "
        "load weights that were pruned, or choose 0"
    )


def test_weights_without_zeros_and_no_weights_are_refused(folder: Path) -> None:
    write_llama(folder)
    config = config_of(folder)
    assert refusal(config) == (
        "pruning.method: zeros, but no pruned tensor of the loaded weights has a zero; load "
        "weights that were pruned, or choose magnitude"
    )
    bare = config.model_copy(update={"model": config.model.model_copy(update={"from_": None})})
    assert refusal(bare) == (
        "pruning.method (configure): zeros looks at loaded weights, and none are "
        "loaded; set model.from or model.weights"
    )


def test_a_tensor_of_zeros_alone_was_initialized_so_and_stays_dense(folder: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    before = write_llama(
        folder, lambda one, tensor: tensor.zero_() if one == name else pruned(one, tensor)
    )
    config = config_of(folder, sparsity=0.42)

    [(trainer, trace)] = train_in_process(1, 1, model_of(config), config, token_data())

    kept = {t.name: t.kept for layer in trainer.layers for t in layer.state.owned}
    assert not before[name].any()
    assert kept[name] == before[name].numel()
    assert trace.weights[name].all()


# -- names ----------------------------------------------------------------------------------


def prunable(**pruning: Any) -> list[str]:
    config = tiny_config(pruning=pruning)
    return list(find_targets(profile(tiny_gpt(config)), config.pruning).shapes)


def test_patterns_mean_tensors_by_their_global_names() -> None:
    assert prunable(exclude=["block0.*", "*.fc?.weight"]) == [
        "block1.attention.qkv.weight",
        "block1.attention.proj.weight",
    ]


class Vision(nn.Module):
    """The parameters of a vision transformer's block, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos = nn.Parameter(torch.zeros(1, 5, 8))
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.embedding = nn.Embedding(5, 8)
        self.proj = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.recurrent = nn.LSTM(8, 8)
        self.convolution = nn.Conv1d(8, 8, 3)


VISION = profile(
    Model([Layer("a", Vision), Layer("b", lambda: nn.Linear(8, 3), kind="head")], summed_loss)
)
MULTIPLYING = [
    "a.proj.weight",
    "a.attention.in_proj_weight",
    "a.attention.out_proj.weight",
    "a.recurrent.weight_ih_l0",
    "a.recurrent.weight_hh_l0",
    "a.convolution.weight",
]
OTHERS = ["a.cls", "a.pos", "a.experts", "a.attention.bias_k", "a.attention.bias_v"]
OTHERS += ["a.embedding.weight"]


@pytest.mark.parametrize(
    ("pruning", "added"),
    [
        ({}, []),
        ({"layers": ["a.*=0.5"]}, []),
        ({"layers": ["a.experts=0.5"]}, ["a.experts"]),
        ({"layers": ["b.*=0.5"]}, ["b.weight"]),
        ({"include": "all"}, [*OTHERS, "b.weight"]),
        ({"include": "all", "exclude": ["a.pos"]}, [*(set(OTHERS) - {"a.pos"}), "b.weight"]),
    ],
)
def test_by_default_only_weights_that_multiply_are_pruned(
    pruning: dict[str, Any], added: list[str]
) -> None:
    config = tiny_config(pruning=pruning)

    targets = find_targets(VISION, config.pruning)

    assert set(targets.shapes) == {*MULTIPLYING, *added}
    order = [
        p.name for layer in VISION.layers for p in layer.parameters if p.name in targets.shapes
    ]
    assert list(targets.shapes) == order


def test_the_start_of_a_run_says_what_is_pruned_and_why_the_rest_is_dense() -> None:
    pruning = tiny_config(pruning={"exclude": ["a.proj.weight"]}).pruning
    targets = find_targets(VISION, pruning)

    assert pruning_lines(VISION, targets, pruning) == [
        "pruned: 5 tensors, 960 of 1,467 entries, of which 191 stay",
        "dense: a.cls, a.pos, a.experts, a.embedding.weight, a.attention.bias_k, "
        "a.attention.bias_v (of no linear, convolution, recurrent or attention module; "
        "pruning.layers may name them) · a.proj.weight (named in pruning.exclude) · 7 vectors · "
        "b.weight (in a layer of kind head; pruning.include: all prunes them)",
    ]
