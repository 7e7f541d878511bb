"""The models that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from axsparse.config.load import LoadedConfig, made_in_python
from axsparse.config.model_config import (
    CnnConfig,
    GptConfig,
    HfConfig,
    Vgg19Config,
    WideResnetConfig,
    of_family,
)
from axsparse.config.schema import Config, sample_length
from axsparse.models.layer import Model
from axsparse.models.start_weights import open_weights, start_from
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.gpt2_files import start_from_gpt2
from axsparse.models.zoo.hf_models import hf_model
from axsparse.models.zoo.image_models import cnn, torchvision_name, vgg19, wide_resnet101_2
from axsparse.runtime.errors import ConfigError

DIGIT_SIZE = 8
"""Pixels on each side of the bundled digits."""
_BUILDERS: dict[str, Callable[[Config], Model]] = {
    "gpt": lambda config: gpt(of_family(config.model, GptConfig), sample_length(config)),
    "hf": lambda config: hf_model(
        of_family(config.model, HfConfig),
        sample_length(config),
        separate=config.data.separate_documents,
    ),
    "vgg19": lambda config: vgg19(of_family(config.model, Vgg19Config), image_size(config)),
    "wide_resnet101_2": lambda config: wide_resnet101_2(
        of_family(config.model, WideResnetConfig), image_size(config)
    ),
    "cnn": lambda config: cnn(of_family(config.model, CnnConfig), image_size(config)),
}
_LEAST_SIZES = {"vgg19": 32, "wide_resnet101_2": 33, "cnn": 4}
"""The fewest pixels on each side: batch normalisation of a single image needs more than one after
the poolings."""


def image_size(config: Config) -> int:
    """Pixels on each side of the images that the model gets."""
    return DIGIT_SIZE if config.data.source == "digits" else config.data.image_size


def model_without_weights(loaded: LoadedConfig) -> Model:
    """The model of a configuration at start values of its own, whatever file that names."""
    bare = loaded.config.model.model_copy(update={"weights": None, "from_": None, "new": ()})
    return named_model(replace(loaded, config=loaded.config.model_copy(update={"model": bare})))


def named_model(configuration: Config | LoadedConfig) -> Model:
    """The model of a configuration; it starts at the values of `model.weights` or `model.from`.

    `configuration` is what `configure` returns.

    Raises ConfigError if images are too small for the model, or its settings differ from those
    of the weights; MissingInputError or DataError if the file of weights cannot be read or
    does not fit.
    """
    loaded = configuration
    if isinstance(loaded, Config):
        loaded = made_in_python(loaded, loaded.model.name)
    config, settings = loaded.config, loaded.config.model
    size, least = image_size(config), _LEAST_SIZES.get(settings.name, 0)
    if size < least:
        key = "data.source" if config.data.source == "digits" else "data.image_size"
        raise ConfigError(
            f"{loaded.where(key)}: nothing is left of {size} pixels a side after the poolings of "
            f"model.name {settings.name}; choose images of at least {least}"
        )
    model = _BUILDERS[settings.name](config)
    path = settings.weights or settings.from_
    if path is None or isinstance(settings, HfConfig):  # that has read its weights itself
        return model
    file = open_weights(path)
    if isinstance(settings, GptConfig):
        return start_from_gpt2(model, file, settings)
    named = torchvision_name if isinstance(settings, WideResnetConfig) else str
    return start_from(model, file, named=named, new=settings.new)
