"""The config.json of Hugging Face's GPT-2 as settings of our GPT, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axsparse.config.hf_json import refuse_others
from axsparse.config.model_config import GptConfig

LAYER_NORM_EPSILON = 1e-5
"""The epsilon of our GPT, which is torch's default."""
_SIZES = {
    "n_layer": ("num_layers", 12),
    "n_embd": ("hidden_size", 768),
    "n_head": ("num_heads", 12),
    "n_positions": ("sequence_length", 1024),
    "vocab_size": ("vocab_size", 50257),
    "tie_word_embeddings": ("tie_embeddings", True),
}
"""Its name of a setting → our name, and the value that it assumes if a file leaves it out."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_FIXED: Mapping[str, tuple[Any, ...]] = {
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
    width = theirs.get("n_embd", _SIZES["n_embd"][1])
    inner = (None, 4 * width if isinstance(width, int) else None)
    refuse_others(path, theirs, {**_FIXED, "n_inner": inner}, "GPT")
    return {ours: theirs.get(name, default) for name, (ours, default) in _SIZES.items()}


def to_gpt2(config: GptConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a GPT whose weights are saved in `dtype`.

    `bos_token_id` and `eos_token_id` are null, since it is not known which tokens begin and end
    a text.
    """
    sizes = {theirs: getattr(config, ours) for theirs, (ours, _) in _SIZES.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _FIXED.items()},
        **sizes,
        "n_inner": None,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
