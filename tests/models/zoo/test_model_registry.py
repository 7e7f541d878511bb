"""The models that a configuration can name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.images import shapes_of

from axsparse.config.load import load_config
from axsparse.models.survey import survey
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError, DataError


def count(*overrides: str) -> int:
    return survey(named_model(load_config(None, overrides))).num_params


def test_flops_are_those_of_the_datas_size() -> None:
    def flops(*overrides: str) -> float:
        return survey(named_model(load_config(None, overrides))).flops

    digits = flops("model.name=cnn", "data.source=digits", "model.channels=1")
    assert flops("model.name=cnn", "model.channels=1", "data.image_size=8") == digits
    assert flops("model.name=vgg19", "data.image_size=32") < flops("model.name=vgg19")
    assert flops("data.sequence_length=64") < flops()


@pytest.mark.parametrize(
    ("model", "size", "least"), [("vgg19", 31, 32), ("wide_resnet101_2", 32, 33), ("cnn", 3, 4)]
)
def test_images_that_are_too_small_are_refused(model: str, size: int, least: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^data.image_size \(--set\): nothing is left of {size} pixels a side after the "
        rf"poolings of model.name {model}; choose images of at least {least}$",
    ):
        count(f"model.name={model}", f"data.image_size={size}")
    count(f"model.name={model}", f"data.image_size={least}")


def test_a_model_starts_at_the_file_that_the_configuration_names(tmp_path: Path) -> None:
    settings = ["model.name=cnn", "model.channels=1", "model.num_classes=10"]
    plain = named_model(load_config(None, settings))
    state = {name: torch.zeros(shape) for name, shape in shapes_of(plain).items()}
    path = tmp_path / "cnn.pt"
    torch.save(state, path)

    model = named_model(load_config(None, [*settings, f"model.weights={path}"]))

    assert survey(model).start.startswith("cnn.pt ")
    with pytest.raises(
        DataError, match=r"has no tensor 'conv1.weight', which is stem.conv1.weight"
    ):
        named_model(load_config(None, ["model.name=wide_resnet101_2", f"model.weights={path}"]))
