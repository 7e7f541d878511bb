"""The models that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from axsparse.config.load import LoadedConfig, made_in_python
from axsparse.config.model_config import (
    CnnConfig,
    GptConfig,
    LlamaConfig,
    Vgg19Config,
    WideResnetConfig,
    of_family,
)
from axsparse.config.schema import Config, sample_length
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, open_weights, start_from
from axsparse.models.zoo import wide_resnet
from axsparse.models.zoo.cnn import cnn
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_models import start_from_hf
from axsparse.models.zoo.llama import llama
from axsparse.models.zoo.vgg import vgg19
from axsparse.runtime.errors import ConfigError

DIGIT_SIZE = 8
"""Pixels on each side of the bundled digits."""


@dataclass(frozen=True)
class _Builder:
    """How the models of one name are made."""

    build: Callable[[Config], Model]
    start: Callable[[Model, WeightFile, Config], Model] = lambda model, file, config: start_from(
        model, file, new=config.model.new
    )
    """Returns a copy of the model that starts at the values of a file."""
    least_image_size: int = 0
    """The fewest pixels on each side: batch normalisation of a single image needs more than one
    after the poolings."""


_BUILDERS = {
    "gpt": _Builder(
        lambda config: gpt(of_family(config.model, GptConfig), sample_length(config)),
        lambda model, file, config: start_from_hf(model, file, of_family(config.model, GptConfig)),
    ),
    "llama": _Builder(
        lambda config: llama(
            of_family(config.model, LlamaConfig),
            sample_length(config),
            separate=config.data.separate_documents,
        ),
        lambda model, file, config: start_from_hf(
            model, file, of_family(config.model, LlamaConfig)
        ),
    ),
    "vgg19": _Builder(
        lambda config: vgg19(of_family(config.model, Vgg19Config), image_size(config)),
        least_image_size=32,
    ),
    "wide_resnet101_2": _Builder(
        lambda config: wide_resnet.wide_resnet101_2(
            of_family(config.model, WideResnetConfig), image_size(config)
        ),
        lambda model, file, config: start_from(
            model, file, named=wide_resnet.torchvision_name, new=config.model.new
        ),
        least_image_size=33,
    ),
    "cnn": _Builder(
        lambda config: cnn(of_family(config.model, CnnConfig), image_size(config)),
        least_image_size=4,
    ),
}


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
    config = loaded.config
    builder = _BUILDERS[config.model.name]
    size = image_size(config)
    if size < builder.least_image_size:
        key = "data.source" if config.data.source == "digits" else "data.image_size"
        raise ConfigError(
            f"{loaded.where(key)}: nothing is left of {size} pixels a side after the poolings of "
            f"model.name {config.model.name}; choose images of at least {builder.least_image_size}"
        )
    model = builder.build(config)
    weights = config.model.weights or config.model.from_
    return model if weights is None else builder.start(model, open_weights(weights), config)
