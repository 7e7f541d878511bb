"""Files of Hugging Face's GPT-2 for our GPT: names and shapes there.

Matrices of the blocks are transposed there: (inputs, outputs). Checkpoints of the body alone, such
as OpenAI's, leave out the prefix. A tied head is stored as the embedding only.
"""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from axsparse.config.hf_config import CONFIG_FILE, from_gpt2, read_json, reject_other_sizes
from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, start_from

_OUR_OWN = "embed.token.weight"
"""A parameter whose name identifies a file with our own names."""
PREFIX = "transformer."
_OUTSIDE = {"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"}
"""Modules outside of blocks, by our global names."""
_INSIDE = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm2": "ln_2",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}
"""Modules of a block, by our names within it."""
_OLD_BUFFERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""Names of buffers that older versions of transformers saved."""


def gpt2_name(name: str, prefix: str = PREFIX) -> str:
    """The name there of a global name; KeyError for one that no model has."""
    if name == "head.weight":
        return "lm_head.weight"
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{prefix}{_OUTSIDE[module]}.{kind}"
    block, _, part = module.partition(".")
    return f"{prefix}h.{block.removeprefix('block')}.{_INSIDE[part]}.{kind}"


def turned(name: str, tensor: Tensor) -> Tensor:
    """A GPT's tensor of a global name, transposed if the two libraries store it differently.

    The same function converts in both directions.
    """
    return tensor.t() if name.startswith("block") and tensor.dim() == 2 else tensor


def start_from_gpt2(model: Model, file: WeightFile, config: GptConfig) -> Model:
    """A copy of a model that starts at a file, whose names are ours or transformers'.

    In the latter case the config.json next to the file, if there is one, is compared with the
    settings: no shape shows the number of heads, for example.

    Raises ConfigError if the settings differ from the file's, DataError if the file is of a model
    that ours cannot represent, and the errors of `start_from`.
    """
    if _OUR_OWN in file.shapes:
        return start_from(model, file, new=config.new)
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        reject_other_sizes(beside, from_gpt2(beside, read_json(beside)), config)
    has_prefix = any(name.startswith(PREFIX) for name in file.shapes)
    return start_from(
        model,
        file,
        named=partial(gpt2_name, prefix=PREFIX if has_prefix else ""),
        convert=turned,
        ignored=lambda name: _OLD_BUFFERS.fullmatch(name) is not None,
        new=config.new,
    )
