"""The models that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable

from axsparse.config.model_config import GptConfig, HfConfig, of_family
from axsparse.config.schema import Config, sample_length
from axsparse.models.layer import Model
from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.gpt import gpt, start_from_gpt2
from axsparse.models.zoo.hf_models import hf_model

_BUILDERS: dict[str, Callable[[Config], Model]] = {
    "gpt": lambda config: gpt(of_family(config.model, GptConfig), sample_length(config)),
    "hf": lambda config: hf_model(
        of_family(config.model, HfConfig),
        sample_length(config),
        separate=config.data.intra_document_attention,
    ),
}


def model_without_weights(config: Config) -> Model:
    """The model of a configuration at initial values, even if it names a file of weights."""
    bare = config.model.model_copy(update={"weights": None, "from_": None, "new": ()})
    return named_model(config.model_copy(update={"model": bare}))


def named_model(config: Config) -> Model:
    """The model of a configuration; it starts at the values of `model.weights` or `model.from`.

    Raises ConfigError if its settings do not match the weights; MissingInputError or DataError if
    the file of weights cannot be read or does not fit.
    """
    settings = config.model
    model = _BUILDERS[settings.name](config)
    path = settings.weights or settings.from_
    if path is None or isinstance(settings, HfConfig):  # that has read its weights itself
        return model
    return start_from_gpt2(model, open_weights(path), settings)
