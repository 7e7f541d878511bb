"""The config.json of Hugging Face's Llama, Mistral, Qwen2 and Qwen3 as settings of our Llama, and
back.

Rotary embeddings stand in `rope_parameters` since transformers 5, and before in `rope_theta` and
`rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axsparse.config.hf_json import refuse_others, shown
from axsparse.config.model_config import LlamaConfig, head_width, key_value_heads
from axsparse.runtime.errors import ConfigError, DataError


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
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "sequence_length",
    "vocab_size": "vocab_size",
}
"""Its name of a setting that every file has → our name."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
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
    missing = [key for key in _SIZES if key not in theirs]
    if missing:
        raise DataError(f"{path}: has no {missing[0]}; get it anew")
    refuse_others(path, theirs, _FIXED, "Llama")
    _refuse_sliding_window(path, theirs)
    kind = KINDS[theirs["model_type"]]
    ours = {name: theirs[key] for key, name in _SIZES.items()}
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
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
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
