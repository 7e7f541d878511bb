"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's transformers: our parameters' names there.

    embed.token                              model.embed_tokens
    block3.norm1, block3.norm2               model.layers.3.input_layernorm,
                                             model.layers.3.post_attention_layernorm
    block3.attention.q, .k, .v, .o           model.layers.3.self_attn.q_proj, …
    block3.attention.q_norm, .k_norm         model.layers.3.self_attn.q_norm, .k_norm
    block3.mlp.gate, .up, .down              model.layers.3.mlp.gate_proj, …
    head.norm, head.weight                   model.norm, lm_head.weight

Tensors have the same shapes in both. Checkpoints of the body alone leave out the prefix "model.".
A tied head is stored as the embedding only.
"""

from __future__ import annotations

import re
from functools import partial

from axsparse.config.hf_config import CONFIG_FILE, model_settings, refuse_other_sizes
from axsparse.config.model_config import LlamaConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, start_from
from axsparse.models.zoo.hf_names import HfNames

PREFIX = "model."
_OUR_OWN = "embed.token.weight"
"""A parameter whose name tells a file with our own names."""
_NAMES = HfNames(
    "layers",
    outside={"embed.token": "embed_tokens", "head.norm": "norm"},
    inside={
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
        **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
)
_FREQUENCIES = re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Names of buffers that older versions of transformers saved."""


def llama_name(name: str, prefix: str = PREFIX) -> str:
    """The name in transformers of a Llama's parameter; KeyError for other global names."""
    return _NAMES.of(name, prefix)


def start_from_llama(model: Model, file: WeightFile, config: LlamaConfig) -> Model:
    """A copy of a Llama that starts at a file, whose names are ours or those of transformers.

    In the latter case the config.json beside the file, if there is one, is compared with the
    settings: no shape tells the base of the rotary embedding, for example.

    Raises ConfigError if the settings differ from those of the file, DataError if the file is
    of a model that our Llama cannot represent, and what `start_from` raises.
    """
    if _OUR_OWN in file.shapes:
        return start_from(model, file, new=config.new)
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        refuse_other_sizes(beside, model_settings(beside), config)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in file.shapes) else ""
    return start_from(
        model,
        file,
        named=partial(llama_name, prefix=prefix),
        ignored=lambda name: _FREQUENCIES.fullmatch(name) is not None,
        new=config.new,
    )
