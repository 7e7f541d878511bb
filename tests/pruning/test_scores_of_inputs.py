"""A score of the user's own may see the inputs of layers: Wanda from outside, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.runs import (
    mlp,
    random_init,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError
from axsparse.training.trainer import Trainer

SAMPLES = 7


def by_inputs(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    del name
    assert inputs.shape == weight.shape[1:] and inputs.dtype == torch.float32
    return weight.abs() * inputs


def config_of(**pruning: Any) -> Config:
    return tiny_config(
        pruning={"method": "custom", "sparsity": 0.7, "calibration_samples": SAMPLES, **pruning},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 3},
    )


def kept_by(
    layout: tuple[int, int], config: Config, model: Model, data: Dataset, **own: Any
) -> dict[str, Tensor]:
    """The positions of the kept entries, the same on all replicas."""
    kept: dict[str, Tensor] = {}
    for _, trace in train_in_process(*layout, model, config, data, **own):
        for name, positions in trace.kept.items():
            assert torch.equal(kept.setdefault(name, positions), positions), name
    return kept


def dense_modules(config: Config) -> list[tuple[str, nn.Module]]:
    """The layers of `mlp` with the weights that a run of this configuration starts from."""
    started: list[tuple[str, nn.Module]] = []

    def note(trainer: Trainer) -> None:
        for layer in trainer.parts.layers:
            module = layer.spec.build()
            module.load_state_dict(layer.module.state_dict())
            started.append((layer.spec.name, module))

    dense = config.model_copy(update={"samo": config.samo.model_copy(update={"enabled": False})})
    train_in_process(1, 1, mlp(), dense, vector_data(), before=note, score=by_inputs)
    return started


def input_of(inner: nn.Module, module: nn.Module, inputs: Tensor) -> Tensor:
    """What a module within another gets when that one is called."""
    seen: list[Tensor] = []
    hook = inner.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    module(inputs)
    hook.remove()
    return seen[0]


@torch.no_grad()
def kept_in_torch(
    modules: Sequence[tuple[str, nn.Module]], config: Config, counts: dict[str, int]
) -> dict[str, Tensor]:
    """Layer by layer, each on what the pruned layers before it return: so many of the entries with
    the largest |weight| × norm of the input stay."""
    data, kept = vector_data(), {}
    samples = samples_of_step(len(data), SAMPLES, 0, config.seed)
    [flow], _ = data.read(samples)
    for name, module in modules:
        for path, linear in module.named_modules():
            weight = f"{name}.{path}.weight"
            if isinstance(linear, nn.Linear) and weight in counts:
                score = (linear.weight.abs() * input_of(linear, module, flow).norm(dim=0)).flatten()
                positions = score.argsort(descending=True)[: counts[weight]]
                mask = torch.zeros_like(score).index_fill_(0, positions, 1)
                linear.weight.mul_(mask.view_as(linear.weight))
                kept[weight] = positions.sort().values
        flow = module(flow)
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
    plain = kept_by((1, 1), config_of(method="magnitude", **pruning), mlp(), vector_data())

    found = kept_by(layout, config, mlp(), vector_data(), score=by_inputs)

    counts = {name: len(kept) for name, kept in plain.items() if name.endswith("0.weight")}
    expected = kept_in_torch(dense_modules(config), config, counts)
    assert len(expected) == 3
    assert all(torch.equal(found[name], kept) for name, kept in expected.items())
    assert not all(torch.equal(plain[name], kept) for name, kept in expected.items())


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_with_a_pattern_wanda_from_outside_is_wanda(layout: tuple[int, int]) -> None:
    config = config_of(pattern="2:4")
    wanda = config_of(method="wanda", pattern="2:4")

    own = kept_by(layout, config, tiny_gpt(config), token_data(), score=by_inputs)

    theirs = kept_by(layout, wanda, tiny_gpt(wanda), token_data())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("pruning", "score", "told"),
    [
        (
            {"method": "gradual", "interval": 1},
            by_inputs,
            "pruning.method: gradual has no inputs of layers when it draws masks, and the score "
            "given to build takes them; choose custom with pruning.at_step 0",
        ),
        (
            {"at_step": 2},
            by_inputs,
            "pruning.method: custom at step 2 has no inputs of layers when it draws masks, and the "
            "score given to build takes them; choose custom with pruning.at_step 0",
        ),
        (
            {"distribution": "global"},
            by_inputs,
            "pruning.distribution: global, but a score that takes inputs draws masks tensor by "
            "tensor before the first step; choose uniform or erk",
        ),
        (
            {},
            lambda name, weight, gradient, inputs: weight,
            "score: it takes gradient and inputs, which no method has at once; leave one of them "
            "out",
        ),
        (
            {},
            lambda name, weight, inputs: inputs,
            "score of hidden0.0.weight: (16,) of torch.float32, torch.strided, on cpu; it must be "
            "one number an entry, a dense real tensor of shape (17, 16) on the CPU",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(
    pruning: dict[str, Any], score: Any, told: str
) -> None:
    config = config_of(**pruning)

    with pytest.raises(ConfigError) as refused:
        kept_by((1, 1), config, mlp(), vector_data(), score=score)

    assert str(refused.value).replace(" (configure)", "") == told


def test_a_convolution_is_refused_by_name() -> None:
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 2, 3), nn.Flatten())

    head = Layer("out", lambda: nn.Linear(28, 5), kind="head", init=random_init)
    model = Model([Layer("conv", convolution, init=random_init), head], mlp().loss)

    told = r"custom scores a matrix by the inputs of a linear layer, and conv\.1\.weight is of none"
    with pytest.raises(ConfigError, match=told):
        kept_by((1, 1), config_of(), model, vector_data(), score=by_inputs)
