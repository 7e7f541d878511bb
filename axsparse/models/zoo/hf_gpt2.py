"""GPT-2 in Hugging Face's transformers: the names that our parameters and settings have there.

    embed.token, embed.position        transformer.wte, transformer.wpe
    block3.norm1, block3.norm2         transformer.h.3.ln_1, transformer.h.3.ln_2
    block3.attention.qkv, .proj        transformer.h.3.attn.c_attn, .c_proj
    block3.fc1, block3.fc2             transformer.h.3.mlp.c_fc, .c_proj
    head.norm, head.weight             transformer.ln_f, lm_head.weight

Matrices of blocks are transposed there: (inputs, outputs). Checkpoints of the body alone, such
as OpenAI's, leave out the prefix "transformer.". A tied head is stored as the embedding only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axsparse.config.schema import ModelConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, start_from
from axsparse.runtime.errors import ConfigError, DataError

CONFIG_FILE = "config.json"
PREFIX = "transformer."
LAYER_NORM_EPSILON = 1e-5
"""The epsilon of our GPT, which is torch's default."""

_OUR_OWN = "embed.token.weight"
"""A parameter whose name tells a file with our own names."""
_WITHOUT_BLOCK = {
    "embed.token": "wte",
    "embed.position": "wpe",
    "head.norm": "ln_f",
}
_IN_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm2": "ln_2",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}
_HEAD = {"head.weight": "lm_head.weight"}
_CAUSAL_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""Names of buffers that older versions of transformers saved."""
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
"""Settings that our GPT fixes, with the values that fit it. The first value is also the one
assumed for a file that leaves the setting out."""


def gpt2_name(name: str, prefix: str = PREFIX) -> str:
    """The name in transformers of a GPT's parameter; KeyError for other global names."""
    if name in _HEAD:
        return _HEAD[name]
    module, _, kind = name.rpartition(".")
    if module in _WITHOUT_BLOCK:
        return f"{prefix}{_WITHOUT_BLOCK[module]}.{kind}"
    block, _, part = module.partition(".")
    return f"{prefix}h.{block.removeprefix('block')}.{_IN_BLOCK[part]}.{kind}"


def turned(name: str, tensor: Tensor) -> Tensor:
    """The tensor of a global name, transposed if the two libraries store it differently.

    The same function converts in both directions.
    """
    return tensor.t() if name.startswith("block") and tensor.dim() == 2 else tensor


def start_from_gpt2(model: Model, file: WeightFile, config: ModelConfig) -> Model:
    """A copy of a GPT that starts at a file, whose names are ours or those of transformers.

    In the latter case the config.json beside the file, if there is one, is compared with the
    settings: no shape tells the number of heads, for example.

    Raises ConfigError if the settings differ from those of the file, DataError if the file is
    of a model that our GPT cannot represent, and what `start_from` raises.
    """
    if _OUR_OWN in file.shapes:
        return start_from(model, file)
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        _check_settings(beside, _read_settings(beside), config)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in file.shapes) else ""
    return start_from(
        model,
        file,
        named=partial(gpt2_name, prefix=prefix),
        convert=turned,
        ignored=lambda name: _CAUSAL_MASK.fullmatch(name) is not None,
    )


def gpt2_settings(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
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
        "dtype": str(dtype).removeprefix("torch."),
    }


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as reason:
        raise DataError(
            f"{path}: cannot be read as JSON ({type(reason).__name__}); get it anew, or remove it"
        ) from reason
    if not isinstance(settings, dict):
        raise DataError(f"{path}: is {type(settings).__name__}, not settings; get it anew")
    return settings


def _check_settings(path: Path, settings: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise DataError for what our GPT cannot represent, ConfigError for other sizes."""
    width = settings.get("n_embd", _SIZES["n_embd"][1])
    inner = ("n_inner", (None, 4 * width if isinstance(width, int) else None))
    for key, values in (*_FIXED.items(), inner):
        has = settings.get(key, values[0])
        if has not in values:
            raise DataError(
                f"{path}: {key} is {_shown(has)}, and the GPT here has "
                f"{' or '.join(map(_shown, values))}; take a checkpoint that was trained so"
            )
    odd = {
        ours: settings.get(theirs, default)
        for theirs, (ours, default) in _SIZES.items()
        if settings.get(theirs, default) != getattr(config, ours)
    }
    if odd:
        raise ConfigError(
            f"{path}: the checkpoint is not of "
            f"{', '.join(f'model.{ours} {_shown(getattr(config, ours))}' for ours in odd)}; set "
            f"{', '.join(f'model.{ours} to {_shown(theirs)}' for ours, theirs in odd.items())}"
        )


def _shown(value: object) -> str:
    """A value as it is written in JSON and in YAML."""
    return json.dumps(value)
