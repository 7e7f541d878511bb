"""Which tensors are pruned, by their names, and by the zeros that other tools leave in a model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hf import SMALL_LLAMA, small_gpt, write_llama
from support.runs import summed_loss, tiny_config, token_data, train_in_process
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.models.start_weights import Convert, unchanged
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.model_registry import named_model
from axsparse.pruning import targets
from axsparse.pruning.targets import (
    erdos_renyi_kernel,
    find_targets,
    kept_counts,
    left_dense,
    n_of_m,
    pruning_lines,
)
from axsparse.runtime.errors import ConfigError

DENSE = "model.layers.1.mlp.down_proj.weight"
"""A tensor that the other tool has left as it was."""


def pruned(name: str, tensor: Tensor) -> Tensor:
    """A tensor with its first two of every four inputs at zero, if the other tool prunes it."""
    if tensor.dim() == 1 or not name.startswith("model.layers") or name == DENSE:
        return tensor
    tensor.view(-1, 4)[:, :2] = 0.0
    return tensor


def all_but(kept: int) -> Convert:
    """Matrices of blocks with so many entries at the beginning that are no zeros; below 0, with so
    many zeros there."""

    def convert(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and name.startswith("model.layers"):
            tensor.view(-1)[slice(kept, None) if kept > 0 else slice(-kept)] = 0.0
        return tensor

    return convert


def config_of(folder: Path, **pruning: Any) -> Config:
    return tiny_config(
        **{
            "model": {**SMALL_LLAMA, "from": str(folder)},
            "pruning": {"method": "zeros", "sparsity": 0.45, **pruning},
            "batch": {"global_batch_size": 4, "microbatch_size": 1},
            "train": {"steps": 3},
        }
    )


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

    ranks = train_in_process(*layout, named_model(config), config, token_data())

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


def test_a_pattern_is_a_sparsity_that_need_not_be_said(folder: Path) -> None:
    config = config_of(folder, pattern="2:4", sparsity=0.9, exclude=[DENSE])

    train_in_process(2, 1, named_model(config), config, token_data())


INSTEAD = " instead of pruning.pattern"
RISING = {"method": "gradual", "sparsity": 0.9, "initial_sparsity": 0.6, "interval": 1}
ELSEWHERE = "set pruning.include: all if those of other layers have zeros"
OWN = {"layers": ["*.up_proj.weight=0.45", f"{DENSE}=0.0"]}


@pytest.mark.parametrize(
    ("written", "pruning", "asked", "found", "right"),
    [
        (pruned, {"sparsity": 0.9}, "sparsity: 0.9", 0.4518, "set it to 0.4518"),
        (pruned, RISING, "initial_sparsity: 0.6", 0.4518, "set it to 0.4518"),
        (pruned, {**RISING, **OWN}, "initial_sparsity: 0.6", 0.4518, "set it to 0.5598"),
        (pruned, {"pattern": "2:4"}, "sparsity: 0.5", 0.4518, "set it to 0.4518" + INSTEAD),
        (all_but(3), {}, "sparsity: 0.45", 0.9971, "set it to 0.9971"),
        (all_but(-3), {}, "sparsity: 0.45", 0.0029, "set it to 0.0029"),
        (unchanged, {}, "sparsity: 0.45", 0, ELSEWHERE),
        (unchanged, RISING, "initial_sparsity: 0.6", 0, ELSEWHERE),
    ],
)
def test_another_sparsity_than_planned_is_told_with_the_right_one(
    tmp_path: Path, written: Convert, pruning: dict[str, Any], asked: str, found: float, right: str
) -> None:
    """Gradual pruning rises from the sparsity of the zeros."""
    write_llama(tmp_path, written)
    config = config_of(tmp_path, **pruning)
    model = named_model(config)

    with pytest.raises(ConfigError) as caught:
        train_in_process(2, 1, model, config, token_data())

    assert caught.value.on_all_ranks
    assert str(caught.value) == (
        f"pruning.{asked}, with which the run was planned, but {found:.4f} of the loaded weights "
        f"is zero; {right}, or load weights that were pruned so"
    )
    if right != ELSEWHERE:
        key, number = asked.partition(":")[0], right.removesuffix(INSTEAD).split()[-1]
        config = config.with_values({f"pruning.{key}": float(number), "pruning.pattern": None})
        train_in_process(2, 1, model, config, token_data())


def test_a_tensor_of_zeros_alone_was_initialized_so_and_stays_dense(folder: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    before = write_llama(
        folder, lambda one, tensor: tensor.zero_() if one == name else pruned(one, tensor)
    )
    config = config_of(folder, sparsity=0.42)

    [(trainer, trace)] = train_in_process(1, 1, named_model(config), config, token_data())

    kept = {t.name: t.kept for layer in trainer.layers for t in layer.state.owned}
    assert not before[name].any()
    assert kept[name] == before[name].numel()
    assert trace.weights[name].all()


# -- names ----------------------------------------------------------------------------------


class Vision(nn.Module):
    """The parameters of a vision transformer's block, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos = nn.Parameter(torch.zeros(1, 5, 8))
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.embedding = nn.Embedding(5, 8)
        self.proj = nn.Linear(8, 8)
        self.proj.down = nn.Parameter(torch.zeros(2, 8))
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
OTHERS += ["a.embedding.weight", "a.proj.down"]


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


def test_a_tied_weight_is_excluded_by_either_of_its_names() -> None:
    profiled = profile(gpt(small_gpt(), 12))
    for name in ("embed.token.weight", "head.weight"):
        pruning = tiny_config(pruning={"include": "all", "exclude": [name]}).pruning

        targets = find_targets(profiled, pruning)

        assert "embed.token.weight" not in targets.shapes
        dense = left_dense(profiled, targets, pruning)["named in pruning.exclude"]
        assert [parameter.name for parameter in dense] == ["embed.token.weight"]


def test_the_start_of_a_run_says_what_is_pruned_and_why_the_rest_is_dense() -> None:
    pruning = tiny_config(pruning={"exclude": ["a.proj.weight"]}).pruning
    targets = find_targets(VISION, pruning)

    assert pruning_lines(VISION, targets, pruning) == [
        "pruned: 5 tensors, 960 of 1,483 entries, of which 191 stay",
        "dense: a.cls, a.pos, a.experts, a.embedding.weight, a.proj.down, a.attention.bias_k, "
        "a.attention.bias_v (the weight of no linear, convolution, recurrent or attention module; "
        "pruning.layers may name them) · a.proj.weight (named in pruning.exclude) · 7 vectors · "
        "b.weight (in a layer of kind head; pruning.include: all prunes them)",
    ]
    first, *others = targets.shapes
    resumed = pruning_lines(VISION, targets, pruning, dict.fromkeys(others, 2))
    assert re.match(r"pruned: 4 tensors, \d+ of 1,483 entries, of which 8 stay$", resumed[0])
    assert resumed[1].startswith(f"dense: {first} (not pruned in the checkpoint) · a.cls, ")


Shapes = dict[str, tuple[int, ...]]

examples = settings(max_examples=150, deadline=None, derandomize=True)
ERK: Literal["erk"] = "erk"


def numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# -- Erdős–Rényi kernel ---------------------------------------------------------------------


TWO: Shapes = {"a": (10, 10), "b": (40, 40)}


@pytest.mark.parametrize(
    ("shapes", "total", "kept"),
    [
        # In the ratio of the sums of dimensions, 20 to 80.
        (TWO, 170, {"a": 34, "b": 136}),
        # The nearest whole numbers to 34.2 and 136.8.
        (TWO, 171, {"a": 34, "b": 137}),
        # A kernel's sum is 4 + 4 + 3 + 3 = 14, the other 42: 13.5 and 40.5; "conv" sorts first.
        ({"conv": (4, 4, 3, 3), "linear": (14, 28)}, 54, {"conv": 14, "linear": 40}),
        # In the ratio of 4 to 60 to 60 the small one would get 16 of its 4 entries.
        ({"small": (2, 2), "a": (50, 10), "b": (10, 50)}, 500, {"small": 4, "a": 248, "b": 248}),
        # In the ratio of 21 to 8 to 40. At first only "a" has more than it can take; of the 100
        # that it leaves, "b" gets 16.7 of its 16.
        ({"a": (1, 20), "b": (4, 4), "c": (20, 20)}, 120, {"a": 20, "b": 16, "c": 84}),
    ],
)
def test_erk_is_that_worked_out_by_hand(shapes: Shapes, total: int, kept: dict[str, int]) -> None:
    assert kept_counts(shapes, 1 - total / numel(shapes), distribution=ERK) == kept


@examples
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_fewer_entries_in_all_never_mean_more_of_one_tensor(sizes: list[tuple[int, int]]) -> None:
    shapes = {f"t{number}": shape for number, shape in enumerate(sizes)}
    total = sum(a * b for a, b in sizes)
    before = erdos_renyi_kernel(shapes, 0)

    for keep in range(1, total + 1):
        now = erdos_renyi_kernel(shapes, keep)
        assert sum(now.values()) == keep
        assert all(before[name] <= now[name] <= math.prod(shapes[name]) for name in shapes)
        before = now


# -- a sparsity of one's own ----------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_a_tensor_with_its_own_sparsity_leaves_that_of_the_others_alone(
    distribution: Literal["uniform", "erk"],
) -> None:
    others: Shapes = {"a": (10, 10), "c": (40, 40)}
    shapes: Shapes = {"a": (10, 10), "b": (30, 10), "c": (40, 40)}

    kept = kept_counts(shapes, 0.9, distribution=distribution, own={"b": 0.5})

    assert kept == {**kept_counts(others, 0.9, distribution=distribution), "b": 150}
    assert list(kept) == ["a", "b", "c"]
    if distribution == "uniform":
        assert (kept["a"], kept["c"]) == (10, 160)
    dense = kept_counts(shapes, 0, distribution=distribution, own={"b": 0.5})
    assert dense == {"a": 100, "b": 150, "c": 1600}


# -- N:M ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 8)])
@pytest.mark.parametrize("kernel", [(), (3,), (2, 3)])
def test_of_each_group_of_inputs_the_best_stay_and_among_equals_the_first(
    n: int, m: int, kernel: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(m)
    score = torch.randint(0, 4, (5, 3 * m, *kernel), generator=generator).float()

    mask = n_of_m(score, n, m)

    # Earlier positions are better by less than scores differ.
    places = torch.arange(m).view(1, 1, m, 1) / m
    ranks = (score.view(5, 3, m, -1) - places).argsort(2, descending=True).argsort(2)
    assert torch.equal(mask.view(5, 3, m, -1), ranks < n)


@pytest.mark.parametrize("chunk", [1, 24, 100])
def test_chunks_leave_no_trace(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
    whole = n_of_m(score, 1, 4)
    monkeypatch.setattr(targets, "CHUNK", chunk)

    assert torch.equal(n_of_m(score, 1, 4), whole)


def test_experts_count_as_matrices_by_themselves() -> None:
    stack, matrix = {"a": (64, 32), "e": (5, 32, 33)}, {"a": (64, 32), "e": (32, 33)}

    uniform = kept_counts(stack, 0.9, distribution="uniform", stacks={"e"})
    assert uniform["e"] == 5 * kept_counts(matrix, 0.9, distribution="uniform")["e"]
    # ERK makes a stack as dense as one of its matrices beside the others.
    kept = kept_counts(stack, 0.9, distribution="erk", stacks={"e"})
    densities = {name: kept[name] / math.prod(shape) for name, shape in stack.items()}
    expected = ((32 + 33) / (32 * 33)) / ((64 + 32) / (64 * 32))
    assert densities["e"] / densities["a"] == pytest.approx(expected, rel=0.01)
    assert sum(kept.values()) == round(0.1 * (64 * 32 + 5 * 32 * 33))
