"""The built-in models that Hugging Face's transformers has too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from axsparse.config.model_config import Family, GptConfig, LlamaConfig
from axsparse.models.start_weights import keep
from axsparse.models.survey import Survey, survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_gpt2 import gpt2_name, turned
from axsparse.models.zoo.hf_llama import llama_name
from axsparse.models.zoo.llama import llama


@dataclass(frozen=True)
class HfModel:
    """A model of some settings, and how transformers names and stores its parameters."""

    survey: Survey
    """What the model contains; its costs are not known."""
    named: Callable[[str], str]
    """The name there of a global name."""
    turned: Callable[[str, Tensor], Tensor]
    """The tensor of a global name as it is stored there."""


def hf_model(config: Family) -> HfModel | None:
    """The model of these settings; None if transformers has no such model."""
    if isinstance(config, GptConfig):
        model = gpt(config, config.sequence_length)
        return HfModel(survey(replace(model, example=None)), gpt2_name, turned)
    if isinstance(config, LlamaConfig):
        model = llama(config, config.sequence_length)
        return HfModel(survey(replace(model, example=None)), llama_name, keep)
    return None
