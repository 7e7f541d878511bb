"""Takes family and sizes of a model from a Hugging Face folder (`model.from`), and writes them.

The config.json of GPT-2 becomes the settings of our GPT, and back; those of Llama, Mistral, Qwen2
and Qwen3 become the settings of our Llama, and back. Rotary embeddings stand in `rope_parameters`
since transformers 5, and before in `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axsparse.config.messages import Setting, show
from axsparse.config.model_config import (
    Family,
    GptConfig,
    LlamaConfig,
    head_width,
    key_value_heads,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

CONFIG_FILE = "config.json"
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


def read_json(path: Path) -> dict[str, Any]:
    """The settings in a file; DataError if it cannot be read or holds something else."""
    try:
        settings: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as reason:
        raise DataError(
            f"{path}: cannot be read as JSON ({type(reason).__name__}); get it anew, or remove it"
        ) from reason
    if not isinstance(settings, dict):
        raise DataError(f"{path}: is {type(settings).__name__}, not settings; get it anew")
    return settings


def refuse_others(
    path: Path, settings: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], model: str
) -> None:
    """DataError for the first setting that `model` here cannot have.

    `fixed` has the values that it can have; the first one is assumed where a file leaves the
    setting out.
    """
    for key, values in fixed.items():
        has = settings.get(key, values[0])
        if has not in values:
            raise DataError(
                f"{path}: {key} is {shown(has)}, and the {model} here has "
                f"{' or '.join(map(shown, values))}; take a checkpoint that was trained so"
            )


def shown(value: object) -> str:
    """A value as it is written in JSON and in YAML, in at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- GPT-2 -----------------------------------------------------------------------------

LAYER_NORM_EPSILON = 1e-5
"""The epsilon of our GPT, which is torch's default."""
_GPT2_SIZES = {
    "n_layer": ("num_layers", 12),
    "n_embd": ("hidden_size", 768),
    "n_head": ("num_heads", 12),
    "n_positions": ("sequence_length", 1024),
    "vocab_size": ("vocab_size", 50257),
    "tie_word_embeddings": ("tie_embeddings", True),
}
"""Its name of a setting → our name, and the value that it assumes if a file leaves it out."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_GPT2_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": _TANH_GELU,
    "layer_norm_epsilon": (LAYER_NORM_EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Settings that our GPT fixes, with the values that fit it."""


def from_gpt2(path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of our GPT, by name; DataError for what it cannot represent.

    Dropout is none of them, since it is a matter of training.
    """
    width = theirs.get("n_embd", _GPT2_SIZES["n_embd"][1])
    inner = (None, 4 * width if isinstance(width, int) else None)
    refuse_others(path, theirs, {**_GPT2_FIXED, "n_inner": inner}, "GPT")
    return {ours: theirs.get(name, default) for name, (ours, default) in _GPT2_SIZES.items()}


def to_gpt2(config: GptConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a GPT whose weights are saved in `dtype`.

    `bos_token_id` and `eos_token_id` are null, since it is not known which tokens begin and end
    a text.
    """
    sizes = {theirs: getattr(config, ours) for theirs, (ours, _) in _GPT2_SIZES.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _GPT2_FIXED.items()},
        **sizes,
        "n_inner": None,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }


# --- Llama -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What sets one model_type apart from the others."""

    architecture: str
    key_value_heads: int | None
    """What it assumes if a file leaves them out; None: as many as of queries."""
    head_dim: int | None = None
    """What it assumes if a file leaves it out; None: hidden size / heads."""
    sliding_window: int | None = 4096
    """What it assumes if a file leaves it out; None: no window."""


KINDS = {
    "llama": _Kind("LlamaForCausalLM", None, sliding_window=None),
    "mistral": _Kind("MistralForCausalLM", 8),
    "qwen2": _Kind("Qwen2ForCausalLM", 32),
    "qwen3": _Kind("Qwen3ForCausalLM", 32, head_dim=128),
}
"""The model_types that are our Llama."""
_LLAMA_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "sequence_length",
    "vocab_size": "vocab_size",
}
"""Its name of a setting that every file has → our name."""
_LLAMA_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
"""Settings that our Llama fixes, with the values that fit it."""
_FULL = "full_attention"
_SCALING = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_length",
}
"""Its name of a number of Llama 3's scaling → our name."""


def from_llama(path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of our Llama, by name; DataError for what it cannot represent."""
    missing = [key for key in _LLAMA_SIZES if key not in theirs]
    if missing:
        raise DataError(f"{path}: has no {missing[0]}; get it anew")
    refuse_others(path, theirs, _LLAMA_FIXED, "Llama")
    _refuse_sliding_window(path, theirs)
    kind = KINDS[theirs["model_type"]]
    ours = {name: theirs[key] for key, name in _LLAMA_SIZES.items()}
    heads, hidden = ours["num_heads"], ours["hidden_size"]
    width = theirs.get("head_dim", kind.head_dim)
    if width is None and _is_at_least(heads, 1) and _is_at_least(hidden, 1):
        width = hidden // heads
    shared = theirs.get("num_key_value_heads", kind.key_value_heads)
    return {
        **ours,
        "num_key_value_heads": heads if shared is None else shared,
        "head_dim": width,
        "tie_embeddings": theirs.get("tie_word_embeddings", False),
        "norm_eps": theirs.get("rms_norm_eps", 1e-6),
        **_rope(path, theirs),
        "qkv_bias": theirs["model_type"] == "qwen2",
        "qk_norm": theirs["model_type"] == "qwen3",
    }


def to_llama(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a Llama whose weights are saved in `dtype`.

    Its model_type is one that has the biases and norms of `config`; ConfigError if none has.
    `bos_token_id` and `eos_token_id` are null, since it is not known which tokens begin and end
    a text.
    """
    name = _kind_for(config)
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor != 1:
        numbers = {theirs: getattr(config, ours) for theirs, ours in _SCALING.items()}
        rope |= {"rope_type": "llama3", **numbers}
    return {
        "architectures": [KINDS[name].architecture],
        "model_type": name,
        **{theirs: getattr(config, ours) for theirs, ours in _LLAMA_SIZES.items()},
        "num_key_value_heads": key_value_heads(config),
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        # Read by transformers before version 5.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }


def _kind_for(config: LlamaConfig) -> str:
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "--to hf: no model of transformers has both model.qkv_bias and model.qk_norm; choose "
            "--to torch"
        )
    if config.qkv_bias:
        return "qwen2"
    if config.qk_norm:
        return "qwen3"
    # transformers refuses a Llama whose heads do not divide its width.
    return "mistral" if config.hidden_size % config.num_heads else "llama"


def _rope(path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings of the rotary embedding; DataError for a scaling that we have not."""
    given = theirs.get("rope_parameters")
    if given is None:
        scaling = theirs.get("rope_scaling") or {}
        _refuse_unless_settings(path, "rope_scaling", scaling)
        given = {"rope_theta": theirs.get("rope_theta"), **scaling}
    _refuse_unless_settings(path, "rope_parameters", given)
    apart = [name for name, value in given.items() if isinstance(value, Mapping)]
    if apart:
        raise DataError(
            f"{path}: its rotary embedding has settings for {shown(apart[0])} alone, and that of "
            "the Llama here is the same in all layers; take a checkpoint that was trained so"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise DataError(
            f"{path}: its rotary embedding is scaled by {shown(kind)}, and the Llama here has "
            '"default" or "llama3"; take a checkpoint that was trained so'
        )
    refuse_others(path, given, {"partial_rotary_factor": (1.0, None)}, "Llama")
    theta = given.get("rope_theta")
    ours = {"rope_theta": 10_000.0 if theta is None else theta, "rope_factor": 1.0}
    if kind == "default":
        return ours
    length = theirs["max_position_embeddings"]
    numbers = {"original_max_position_embeddings": length, **given}
    missing = [key for key in _SCALING if key not in numbers]
    if missing:
        raise DataError(f"{path}: its llama3 scaling has no {missing[0]}; get it anew")
    return ours | {name: numbers[key] for key, name in _SCALING.items()}


def _refuse_unless_settings(path: Path, key: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise DataError(f"{path}: {key} is {shown(value)}, no mapping of settings; get it anew")


def _refuse_sliding_window(path: Path, theirs: Mapping[str, Any]) -> None:
    """DataError if some token would not see all tokens before it."""
    kinds = theirs.get("layer_types") or []
    if not isinstance(kinds, list):
        raise DataError(f"{path}: layer_types is {shown(kinds)}, not a list; get it anew")
    others = [kind for kind in kinds if kind != _FULL]
    if others:
        raise DataError(
            f"{path}: layer_types has {shown(others[0])}, and the Llama here has {shown(_FULL)} "
            "only; take a checkpoint that was trained so"
        )
    kind = theirs["model_type"]
    window = theirs.get("sliding_window", KINDS[kind].sliding_window)
    is_qwen = kind.startswith("qwen")
    if is_qwen and (kinds or not theirs.get("use_sliding_window", False)):
        return
    if is_qwen and _is_at_least(theirs.get("max_window_layers", 28), theirs["num_hidden_layers"]):
        return
    if window is not None and not _is_at_least(window, theirs["max_position_embeddings"]):
        raise DataError(
            f"{path}: sliding_window is {shown(window)}, and tokens of the Llama here see all "
            "tokens before them; take a checkpoint without, or with one as long as "
            "max_position_embeddings"
        )


def _is_at_least(number: object, least: object) -> bool:
    return isinstance(number, int) and isinstance(least, int) and number >= least
