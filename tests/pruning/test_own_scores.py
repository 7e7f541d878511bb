"""A score of the user's own may see gradients and inputs: it has the bits of SNIP and of Wanda."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import mlp, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.order import samples_of_step
from axsparse.training.trainer import Trainer

SAMPLES = 7


def by_inputs(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    del name
    assert inputs.shape == weight.shape[1:]
    assert inputs.dtype == torch.float32
    return weight.abs() * inputs


def config_of(**pruning: Any) -> Config:
    return tiny_config(
        pruning={"method": "custom", "sparsity": 0.7, "calibration_samples": SAMPLES, **pruning},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 3},
    )


def kept_by(layout: tuple[int, int], config: Config, **own: Any) -> dict[str, Tensor]:
    """The positions of the kept entries, the same on all replicas."""
    kept: dict[str, Tensor] = {}
    for _, trace in train_in_process(*layout, mlp(), config, vector_data(), **own):
        for name, positions in trace.kept.items():
            assert torch.equal(kept.setdefault(name, positions), positions), name
    return kept


def dense_modules(config: Config) -> list[tuple[str, nn.Module]]:
    """The layers of a model with the weights that a run of this configuration starts from."""
    started: list[tuple[str, nn.Module]] = []

    def note(trainer: Trainer) -> None:
        for layer in trainer.layers:
            module = layer.spec.build()
            module.load_state_dict(layer.module.state_dict())
            started.append((layer.spec.name, module))

    dense = config.model_copy(update={"samo": config.samo.model_copy(update={"enabled": False})})
    train_in_process(1, 1, mlp(), dense, vector_data(), before=note, score=by_inputs)
    return started


def kept_in_torch(config: Config, counts: dict[str, int]) -> dict[str, Tensor]:
    """Layer by layer, each on what the pruned layers before it return: so many of the entries with
    the largest |weight| × norm of the input stay."""
    data, kept = vector_data(), {}
    [flow], _ = data.read(samples_of_step(len(data), SAMPLES, 0, config.seed))
    for name, module in dense_modules(config):
        if (weight := f"{name}.0.weight") in counts:
            values: Tensor = module.get_parameter("0.weight").data
            score = (values.abs() * flow.norm(dim=0)).flatten()
            positions = score.argsort(descending=True)[: counts[weight]]
            mask = torch.zeros_like(score).index_fill_(0, positions, 1)
            values.mul_(mask.view_as(values))
            kept[weight] = positions.sort().values
        flow = module(flow).detach()
    return kept


@pytest.mark.parametrize(
    ("layout", "pruning"),
    [
        ((1, 1), {}),
        ((2, 1), {}),
        ((1, 2), {}),
        ((2, 1), {"distribution": "erk", "layers": ["hidden0.*=0.25"]}),
    ],
)
def test_a_score_of_inputs_draws_the_masks_of_its_formula_in_every_layout(
    layout: tuple[int, int], pruning: dict[str, Any]
) -> None:
    config = config_of(**pruning)
    plain = kept_by((1, 1), config_of(method="magnitude", **pruning))

    found = kept_by(layout, config, score=by_inputs)

    counts = {name: len(kept) for name, kept in plain.items() if name.endswith(".0.weight")}
    expected = kept_in_torch(config, counts)
    assert expected.keys() == counts.keys()
    assert all(torch.equal(found[name], kept) for name, kept in expected.items())
    assert not all(torch.equal(plain[name], kept) for name, kept in expected.items())


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
