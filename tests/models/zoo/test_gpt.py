"""The GPT family, and what is the same of all decoders: start values, flops, causality."""

from __future__ import annotations

import pytest
import torch

from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Tie
from axsparse.models.model_profile import profile
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.seeds import keyed_generator


def config(
    *, layers: int = 3, hidden: int = 32, dropout: float = 0.0, tied: bool = True
) -> GptConfig:
    return GptConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=4,
        sequence_length=10,
        vocab_size=50,
        tie_embeddings=tied,
        dropout=dropout,
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "tied"), [(1, 16, True), (3, 32, True), (3, 32, False)]
)
def test_the_number_of_parameters_follows_its_formula(layers: int, hidden: int, tied: bool) -> None:
    v, s, h = 50, 10, hidden
    expected = 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h

    model = gpt(config(layers=layers, hidden=hidden, tied=tied), 10)

    assert profile(model).num_params == expected + (0 if tied else v * h)
    assert model.ties == ([Tie("embed.token.weight", "head.weight")] if tied else [])


def test_flops_are_those_of_the_matrix_products() -> None:
    s, h, v = 7, 32, 50
    matrices = 2 * s * (3 * h * h + h * h + 4 * h * h + 4 * h * h)
    attention = 2 * (2 * s * s * h)

    flops = [layer.flops for layer in profile(gpt(config(), s)).layers]

    assert flops == [0, *[matrices + attention] * 3, 2 * s * h * v]


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("fc1.weight", 0.02),
        ("token.weight", 0.02),
        ("attention.proj.weight", 0.02 / 4),
        ("fc2.weight", 0.02 / 4),
    ],
)
def test_matrices_start_normal_and_residual_projections_smaller(name: str, std: float) -> None:
    init = gpt(config(layers=8), 10).layers[1].init  # 4² is twice the number of layers
    assert init is not None

    values = init(name, (300, 300), keyed_generator(1, name))

    assert values.dtype == torch.float32
    assert values.mean().item() == pytest.approx(0, abs=std / 50)
    assert values.std().item() == pytest.approx(std, rel=0.02)
