"""The models that a configuration can name."""

from __future__ import annotations

from axsparse.config.model_config import HfConfig
from axsparse.config.schema import Config, sample_length
from axsparse.models.layer import Model
from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.gpt import gpt, start_from_gpt2
from axsparse.models.zoo.hf_models import hf_model
from axsparse.runtime.errors import check_kind


def model_without_weights(config: Config) -> Model:
    """The model of a configuration at initial values, even if it names a file of weights."""
    bare = config.model.model_copy(update={"weights": None, "from_": None, "new": ()})
    return named_model(config.model_copy(update={"model": bare}))


def named_model(config: Config) -> Model:
    """The model of a configuration; it starts at the values of `model.weights` or `model.from`.

    Raises ConfigError if its settings do not match the weights; MissingInputError or DataError if
    the file of weights cannot be read or does not fit.
    """
    check_kind("named_model: config", config, Config, "make one by ax.configure")
    settings, length = config.model, sample_length(config)
    if isinstance(settings, HfConfig):
        return hf_model(settings, length, separate=config.data.intra_document_attention)
    model, path = gpt(settings, length), settings.weights or settings.from_
    return model if path is None else start_from_gpt2(model, open_weights(path), settings)
