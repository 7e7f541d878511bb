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
"""Pixels on each side of the bundled digits."""


def _start(model: Model, file: WeightFile, _: ModelConfig) -> Model:
    return start_from(model, file)


def _start_wide_resnet(model: Model, file: WeightFile, _: ModelConfig) -> Model:
    return start_from(model, file, named=wide_resnet.torchvision_name)


@dataclass(frozen=True)
class _Family:
    """How the models of one name are made."""

    build: Callable[[Config], Model]
    start: Callable[[Model, WeightFile, ModelConfig], Model] = _start
    """Returns a copy of the model that starts at the values of a file."""
    least_image_size: int = 0
    """The fewest pixels on each side: batch normalisation of a single image needs more than one
    after the poolings."""


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
    """Pixels on each side of the images that the model gets."""
    return DIGIT_SIZE if config.data.source == "digits" else config.data.image_size


def named_model(loaded: LoadedConfig) -> Model:
    """The model of a configuration; it starts at the values of `model.weights` if that is set.

    Raises ConfigError if images are too small for the model, or its settings differ from those
    of the weights; MissingInputError or DataError if the file of weights cannot be read or
    does not fit.
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
