"""Sparsities follow the published formulas and end exactly, from dense or from given zeros."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hf import SMALL_LLAMA, write_llama
from support.resuming import ran
from support.runs import tiny_config, token_data
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.models.zoo.model_registry import named_model
from axsparse.pruning.methods.gradual import gradual_sparsity, iterative_sparsity

rising = partial(gradual_sparsity, initial_share=0.5 / 0.9)
PUBLISHED = [
    (rising, [0.5, *(0.9 - 0.4 * left**3 for left in (0.75, 0.5, 0.25)), 0.9]),
    (gradual_sparsity, [0, *(0.9 * (1 - left**3) for left in (0.75, 0.5, 0.25)), 0.9]),
    (iterative_sparsity, [0, *(1 - 0.1 ** (done / 4) for done in (1, 2, 3)), 0.9]),
]


@pytest.mark.parametrize(("sparsity", "expected"), PUBLISHED)
def test_sparsities_are_those_of_the_papers(
    sparsity: Callable[..., float], expected: list[float]
) -> None:
    found = [sparsity(number, final=0.9, rounds=4) for number in range(5)]

    assert found == pytest.approx(expected)


@pytest.mark.parametrize("sparsity", [gradual_sparsity, rising, iterative_sparsity])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(final=st.floats(0, 1, exclude_max=True), rounds=st.integers(1, 100))
def test_pruning_never_brings_back_and_ends_exactly(
    sparsity: Callable[..., float], final: float, rounds: int
) -> None:
    found = [sparsity(number, final=final, rounds=rounds) for number in range(rounds + 1)]

    assert found == sorted(found)
    first = 0.5 / 0.9 * final if sparsity is rising else 0.0
    assert found[0] == pytest.approx(first)
    assert found[-1] == final
    assert all(0 <= sparsity < 1 for sparsity in found)


# -- from the zeros of loaded weights ------------------------------------------------------

FEW = "model.layers.1.mlp.down_proj.weight"
"""The matrix that has fewer kept entries than the first round asks for."""


def zeroed(name: str, tensor: Tensor) -> Tensor:
    """A matrix with half of its entries at zero, or with nine tenths."""
    if tensor.dim() > 1 and name.startswith("model.layers"):
        tensor.view(-1)[torch.arange(tensor.numel()) % (10 if name == FEW else 2) > 0] = 0.0
    return tensor


def config_of(folder: Path, **pruning: Any) -> Config:
    rounds = {"at_step": 2, "interval": 2, "until_step": 6, "eval_steps": 1}
    pruning = {"method": "gradual", "initial_sparsity": 0.54, "sparsity": 0.8, **rounds, **pruning}
    return tiny_config(
        **{
            "model": {**SMALL_LLAMA, "from": str(folder)},
            "pruning": pruning,
            "batch": {"global_batch_size": 4, "microbatch_size": 1},
        }
    )


def test_it_rises_from_zeros_alike_on_any_number_of_stages_and_after_a_stop(tmp_path: Path) -> None:
    weights = write_llama(tmp_path / "model", zeroed)
    config, validation = config_of(tmp_path / "model"), token_data(samples=5)
    run = partial(ran, model=named_model, validation=validation)

    alone = run((1, 1), config, tmp_path / "alone")
    staged = run((3, 1), config, tmp_path / "staged")
    run((1, 1), config, tmp_path / "cut", stop_after=5)
    resumed = run((2, 1), config, tmp_path / "cut", resume="auto")

    for other in (staged, resumed):
        assert other.state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            assert torch.equal(other.state[name], value), name
    assert staged.losses == alone.losses
    for name, kept in alone.state.items():
        if name.startswith("kept/"):
            of = name.removeprefix("kept/")
            allowed = weights[of].view(-1)[kept.long()] != 0
            assert allowed.all() or ".layers." not in of, "pruned entries stay pruned"
            share = 0.1 if of == FEW else 0.2 if "_proj" in of else 1.0
            assert len(kept) == pytest.approx(share * weights[of].numel(), abs=1), of
    lines = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    masks = [record for record in map(json.loads, lines) if "masks" in record]
    assert [record["step"] for record in masks] == [4, 6]
    found = [record["sparsity"] for record in masks]
    few = 0.1 * weights[FEW].numel() / sum(weights[n].numel() for n in weights if "_proj" in n)
    assert found[0] == pytest.approx(0.8 - 0.26 * 0.125 + few * (0.9 - 0.7675) / 0.1, abs=1e-3)
    assert found[1] == pytest.approx(0.8 + few, abs=1e-3)
    sizes = [(record["model_state_bytes_before"], record["model_state_bytes"]) for record in masks]
    assert sizes[0][0] > sizes[0][1] == sizes[1][0] > sizes[1][1], "state shrinks with the mask"
    for record in masks:
        assert record["loss_before"] != record["loss_after"]
