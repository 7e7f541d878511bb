"""The models that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config, ModelConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, open_weights, start_from
from axsparse.models.zoo import wide_resnet
from axsparse.models.zoo.cnn import cnn
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_gpt2 import start_from_gpt2
from axsparse.models.zoo.vgg import vgg19
from axsparse.runtime.errors import ConfigError

DIGIT_SIZE = 8
"""Pixels a side of the bundled digits."""


def _start(model: Model, file: WeightFile, _: ModelConfig) -> Model:
    return start_from(model, file)


def _start_wide_resnet(model: Model, file: WeightFile, _: ModelConfig) -> Model:
    return start_from(model, file, named=wide_resnet.torchvision_name)


@dataclass(frozen=True)
class _Family:
    build: Callable[[Config], Model]
    start: Callable[[Model, WeightFile, ModelConfig], Model] = _start
    """The model, starting at the values of a file."""
    least_image_size: int = 0
    """Pixels a side; batch normalisation wants more than one left, even of one image."""


def _gpt(config: Config) -> Model:
    length = config.data.sequence_length
    return gpt(config.model, config.model.sequence_length if length == "auto" else length)


_FAMILIES = {
    "gpt": _Family(_gpt, start_from_gpt2),
    "vgg19": _Family(lambda config: vgg19(config.model, image_size(config)), least_image_size=32),
    "wide_resnet101_2": _Family(
        lambda config: wide_resnet.wide_resnet101_2(config.model, image_size(config)),
        _start_wide_resnet,
        least_image_size=33,
    ),
    "cnn": _Family(lambda config: cnn(config.model, image_size(config)), least_image_size=4),
}


def image_size(config: Config) -> int:
    """Pixels a side of what the model sees."""
    return DIGIT_SIZE if config.data.source == "digits" else config.data.image_size


def named_model(loaded: LoadedConfig) -> Model:
    """The model of a configuration, starting at the values of `model.weights` if there are any.

    Raises ConfigError for images that are too small for it and for settings that are not
    those of the weights, MissingInputError or DataError for a file of weights that cannot
    be read or does not fit.
    """
    config = loaded.config
    family = _FAMILIES[config.model.name]
    size = image_size(config)
    if size < family.least_image_size:
        key = "data.source" if config.data.source == "digits" else "data.image_size"
        raise ConfigError(
            f"{loaded.where(key)}: nothing is left of {size} pixels a side after the poolings of "
            f"model.name {config.model.name}; choose images of at least {family.least_image_size}"
        )
    model = family.build(config)
    if config.model.weights is None:
        return model
    return family.start(model, open_weights(config.model.weights), config.model)
