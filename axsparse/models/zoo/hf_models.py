"""The built-in models that Hugging Face's transformers has too: names and shapes there.

Matrices of GPT-2's blocks are transposed there: (inputs, outputs). Checkpoints of the body alone,
such as OpenAI's, leave out the prefix. A tied head is stored as the embedding only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from axsparse.config.hf_config import (
    CONFIG_FILE,
    from_gpt2,
    model_settings,
    read_json,
    refuse_other_sizes,
)
from axsparse.config.model_config import Family, GptConfig, LlamaConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, start_from, unchanged
from axsparse.models.survey import Survey, survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.llama import llama

_OUR_OWN = "embed.token.weight"
"""A parameter whose name tells a file with our own names."""


def turned(name: str, tensor: Tensor) -> Tensor:
    """A GPT's tensor of a global name, transposed if the two libraries store it differently.

    The same function converts in both directions.
    """
    return tensor.t() if name.startswith("block") and tensor.dim() == 2 else tensor


@dataclass(frozen=True)
class HfFamily:
    """How transformers names and stores the parameters of a family of models."""

    prefix: str
    blocks: str
    """The list of blocks, such as "layers"."""
    outside: Mapping[str, str]
    """Modules outside of blocks, by our global names."""
    inside: Mapping[str, str]
    """Modules of a block, by our names within it."""
    old_buffers: re.Pattern[str]
    """Names of buffers that older versions of transformers saved."""
    settings: Callable[[Path], Mapping[str, Any]]
    """Reads a config.json."""
    turned: Callable[[str, Tensor], Tensor] = unchanged
    """The tensor of a global name as it is stored there."""

    def named(self, name: str, prefix: str | None = None) -> str:
        """The name there of a global name; KeyError for one that no model has."""
        if name == "head.weight":
            return "lm_head.weight"
        prefix = self.prefix if prefix is None else prefix
        module, _, kind = name.rpartition(".")
        if module in self.outside:
            return f"{prefix}{self.outside[module]}.{kind}"
        block, _, part = module.partition(".")
        return f"{prefix}{self.blocks}.{block.removeprefix('block')}.{self.inside[part]}.{kind}"


GPT2 = HfFamily(
    "transformer.",
    "h",
    outside={"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"},
    inside={
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.proj": "attn.c_proj",
        "norm2": "ln_2",
        "fc1": "mlp.c_fc",
        "fc2": "mlp.c_proj",
    },
    old_buffers=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    settings=lambda path: from_gpt2(path, read_json(path)),
    turned=turned,
)
LLAMA = HfFamily(  # and Mistral, Qwen2, Qwen3
    "model.",
    "layers",
    outside={"embed.token": "embed_tokens", "head.norm": "norm"},
    inside={
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
        **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
    old_buffers=re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    settings=model_settings,
)


def hf_model(config: Family) -> tuple[HfFamily, Survey] | None:
    """How transformers stores a model of these settings, and what the model contains.

    None if transformers has no such model. The survey's costs are not known.
    """
    if isinstance(config, GptConfig):
        family, model = GPT2, gpt(config, config.sequence_length)
    elif isinstance(config, LlamaConfig):
        family, model = LLAMA, llama(config, config.sequence_length)
    else:
        return None
    return family, survey(replace(model, example=None))


def start_from_hf(model: Model, file: WeightFile, config: GptConfig | LlamaConfig) -> Model:
    """A copy of a model that starts at a file, whose names are ours or those of transformers.

    In the latter case the config.json beside the file, if there is one, is compared with the
    settings: no shape tells the number of heads, for example.

    Raises ConfigError if the settings differ from those of the file, DataError if the file is
    of a model that ours cannot represent, and what `start_from` raises.
    """
    if _OUR_OWN in file.shapes:
        return start_from(model, file, new=config.new)
    family = GPT2 if isinstance(config, GptConfig) else LLAMA
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        refuse_other_sizes(beside, family.settings(beside), config)
    has_prefix = any(name.startswith(family.prefix) for name in file.shapes)
    return start_from(
        model,
        file,
        named=partial(family.named, prefix=family.prefix if has_prefix else ""),
        convert=family.turned,
        ignored=lambda name: family.old_buffers.fullmatch(name) is not None,
        new=config.new,
    )
