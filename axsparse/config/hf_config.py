"""Takes family and sizes of a model from a Hugging Face folder (`model.from`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axsparse.config.hf_gpt2_settings import from_gpt2, to_gpt2
from axsparse.config.hf_json import CONFIG_FILE, read_json, shown
from axsparse.config.hf_llama_settings import KINDS, from_llama, to_llama
from axsparse.config.messages import Setting, show
from axsparse.config.model_config import (
    Family,
    GptConfig,
    LlamaConfig,
    head_width,
    key_value_heads,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

FROM = "model.from"


def with_folder(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """The settings, with those of the folder that `model.from` names, if it names one.

    Raises ConfigError for a given setting that disagrees with the folder's, MissingInputError if
    the folder cannot be read, DataError if its model is none of ours.
    """
    named = settings.get(FROM)
    if named is None or not isinstance(named.value, str):
        return settings  # pydantic refuses other values
    weights = settings.get("model.weights")
    if weights is not None and weights.value is not None:
        raise ConfigError(
            f"model.weights ({weights.origin}): {show(weights.value)}, but {FROM} "
            f"{show(named.value)} has weights as well; leave one of them out"
        )
    path = config_file(named.value)
    filled = dict(settings)
    for name, value in model_settings(path).items():
        key = f"model.{name}"
        given = settings.get(key)
        if given is None or given.value is None:
            filled[key] = Setting(value, str(path))
        elif given.value != value:
            shorter = "; for shorter samples set data.sequence_length"
            more = shorter if name == "sequence_length" else ""
            raise ConfigError(
                f"{key} ({given.origin}): {show(given.value)}, but {path} has {shown(value)}; "
                f"leave it out, or name another folder{more}"
            )
    return filled


def config_file(folder: str) -> Path:
    """The config.json of a folder; MissingInputError if there is none."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise MissingInputError(
            f"{FROM}: {folder!r} has no {CONFIG_FILE}; name a Hugging Face folder of {CONFIG_FILE} "
            "and safetensors"
        )
    return path


def model_settings(path: Path) -> dict[str, Any]:
    """The settings in a config.json, `name` first; DataError if no model here has them."""
    theirs = read_json(path)
    kind = theirs.get("model_type")
    if kind == "gpt2":
        return {"name": "gpt", **from_gpt2(path, theirs)}
    if isinstance(kind, str) and kind in KINDS:
        return {"name": "llama", **from_llama(path, theirs)}
    raise DataError(
        f"{path}: model_type is {shown(kind)}, and the models here are gpt2, {', '.join(KINDS)}; "
        "take a checkpoint of one of these"
    )


def config_json(model: Family, dtype: str) -> dict[str, Any]:
    """The config.json of a model whose weights are saved in `dtype`.

    ConfigError if no model of transformers has these settings.
    """
    if isinstance(model, GptConfig):
        return to_gpt2(model, dtype)
    assert isinstance(model, LlamaConfig), f"transformers has no {model.name}"
    return to_llama(model, dtype)


def refuse_other_sizes(path: Path, theirs: Mapping[str, Any], model: Family) -> None:
    """ConfigError if a config.json, as `model_settings` returns it, is not of these settings."""
    own = model.model_dump()
    if isinstance(model, LlamaConfig):
        own |= {"num_key_value_heads": key_value_heads(model), "head_dim": head_width(model)}
    odd = {name: value for name, value in theirs.items() if own.get(name) != value}
    if odd:
        raise ConfigError(
            f"{path}: the checkpoint is not of "
            f"{', '.join(f'model.{name} {shown(own.get(name))}' for name in odd)}; set "
            f"{', '.join(f'model.{name} to {shown(value)}' for name, value in odd.items())}"
        )
