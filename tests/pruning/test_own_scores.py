"""A score of the user's own may see gradients and inputs: it has the bits of SNIP and of Wanda."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import (
    Doing,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model


def by_inputs(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    del name
    assert inputs.shape == weight.shape[1:]
    assert inputs.dtype == torch.float32
    return weight.abs() * inputs


def kept_by(layout: tuple[int, int], config: Config, **own: Any) -> dict[str, Tensor]:
    """The positions of the kept entries, the same on all replicas."""
    kept: dict[str, Tensor] = {}
    for _, trace in train_in_process(*layout, tiny_gpt(config), config, token_data(), **own):
        for name, positions in trace.kept.items():
            assert torch.equal(kept.setdefault(name, positions), positions), name
    return kept


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_a_score_of_inputs_draws_the_masks_of_wanda(layout: tuple[int, int]) -> None:
    """Of a pattern, whose groups are the same for both."""

    def kept(method: str, **own: Any) -> dict[str, Tensor]:
        pruning = {"method": method, "pattern": "2:4", "calibration_samples": 7}
        batch = {"global_batch_size": 4, "microbatch_size": 2}
        return kept_by(layout, tiny_config(pruning=pruning, batch=batch, train={"steps": 1}), **own)

    wanda, plain, own = kept("wanda"), kept("magnitude"), kept("custom", score=by_inputs)

    assert own.keys() == wanda.keys()
    assert all(torch.equal(own[name], wanda[name]) for name in wanda)
    assert not all(torch.equal(own[name], plain[name]) for name in wanda)


def from_outside(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
    del name
    assert gradient.shape == weight.shape
    return (weight * gradient).abs()


def snip_config(**pruning: Any) -> Config:
    return tiny_config(pruning={"sparsity": 0.7, **pruning}, train={"steps": 4})


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in [(1, 1), (2, 1)]), (2, 2)],
)
def test_sensitivity_from_outside_draws_the_masks_of_snip(layout: tuple[int, int]) -> None:
    snip = kept_by(layout, snip_config(method="snip", at_step=2))

    own = kept_by(layout, snip_config(method="custom", at_step=2), score=from_outside)

    plain = kept_by(layout, snip_config(method="magnitude", at_step=2))
    assert own.keys() == snip.keys()
    assert all(torch.equal(own[name], snip[name]) for name in snip)
    assert not all(torch.equal(own[name], plain[name]) for name in snip)


def test_every_round_of_gradual_pruning_sees_gradients() -> None:
    seen: list[str] = []

    def noting(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        seen.append(name)
        return from_outside(name, weight, gradient)

    kept_by((1, 1), snip_config(method="gradual", interval=1, until_step=3), score=noting)

    assert len(seen) == 3 * len(set(seen))


def test_a_score_sees_gradients_without_the_loss_scale() -> None:
    seen: dict[str, dict[str, float]] = {"fp32": {}, "fp16": {}}
    for precision, norms in seen.items():

        def noting(
            name: str, weight: Tensor, gradient: Tensor, norms: dict[str, float] = norms
        ) -> Tensor:
            norms[name] = gradient.norm().item()
            return from_outside(name, weight, gradient)

        config = tiny_config(
            precision=precision,
            pruning={"method": "custom", "at_step": 1},
            train={"steps": 2},
        )
        kept_by((1, 1), config, score=noting)

    assert seen["fp16"] == pytest.approx(seen["fp32"], rel=0.02)


def test_gradients_for_scores_leave_no_trace_in_buffers() -> None:
    """Of fp16, whose loss scale is lowered until the gradients for scores are finite."""

    def counting(m: Any, x: Tensor) -> Any:
        m.calls.add_(1)
        return m.linear(x)

    model = Model([Layer("last", lambda: Doing(counting, 5, calls=torch.zeros(1)))], summed_loss)
    scaled = {"precision": "fp16", "loss_scale": {"initial": 2.0**30}}
    snip = {"method": "snip", "include": "all"}
    config = tiny_config(pruning=snip, train={"steps": 1}, **scaled)
    [(trainer, trace)] = train_in_process(1, 1, model, config, vector_data())

    assert trainer.progress.loss_scale < 2.0**29, "scores were computed several times"
    assert trace.buffers["last.calls"].item() == 12
