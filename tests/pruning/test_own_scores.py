"""A score of the user's own may see gradients: it has the bits of SNIP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import mlp, tiny_config, train_in_process, vector_data
from torch import Tensor

from axsparse.config.schema import Config


def from_outside(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
    del name
    assert gradient.shape == weight.shape
    return (weight * gradient).abs()


def snip_config(**pruning: Any) -> Config:
    return tiny_config(pruning={"sparsity": 0.7, **pruning}, train={"steps": 4})


def snip_kept(layout: tuple[int, int], config: Config, **own: Any) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for _, trace in train_in_process(*layout, mlp(), config, vector_data(), **own):
        kept |= trace.kept
    return kept


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in [(1, 1), (2, 1)]), (2, 2)],
)
def test_sensitivity_from_outside_draws_the_masks_of_snip(layout: tuple[int, int]) -> None:
    snip = snip_kept(layout, snip_config(method="snip", at_step=2))

    own = snip_kept(layout, snip_config(method="custom", at_step=2), score=from_outside)

    plain = snip_kept(layout, snip_config(method="magnitude", at_step=2))
    assert own.keys() == snip.keys()
    assert all(torch.equal(own[name], snip[name]) for name in snip)
    assert not all(torch.equal(own[name], plain[name]) for name in snip)


def test_every_round_of_gradual_pruning_sees_gradients() -> None:
    seen: list[str] = []

    def noting(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        seen.append(name)
        return from_outside(name, weight, gradient)

    snip_kept((1, 1), snip_config(method="gradual", interval=1, until_step=3), score=noting)

    assert len(seen) == 3 * len(set(seen))
