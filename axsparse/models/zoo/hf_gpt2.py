"""GPT-2 in Hugging Face's transformers: the names that our parameters have there.

    embed.token, embed.position        transformer.wte, transformer.wpe
    block3.norm1, block3.norm2         transformer.h.3.ln_1, transformer.h.3.ln_2
    block3.attention.qkv, .proj        transformer.h.3.attn.c_attn, .c_proj
    block3.fc1, block3.fc2             transformer.h.3.mlp.c_fc, .c_proj
    head.norm, head.weight             transformer.ln_f, lm_head.weight

Matrices of blocks are transposed there: (inputs, outputs). Checkpoints of the body alone, such
as OpenAI's, leave out the prefix "transformer.". A tied head is stored as the embedding only.
"""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from axsparse.config.hf_config import CONFIG_FILE, from_gpt2, read_json, refuse_other_sizes
from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import WeightFile, start_from
from axsparse.models.zoo.hf_names import HfNames

PREFIX = "transformer."

_OUR_OWN = "embed.token.weight"
"""A parameter whose name tells a file with our own names."""
_NAMES = HfNames(
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
)
_CAUSAL_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""Names of buffers that older versions of transformers saved."""


def gpt2_name(name: str, prefix: str = PREFIX) -> str:
    """The name in transformers of a GPT's parameter; KeyError for other global names."""
    return _NAMES.of(name, prefix)


def turned(name: str, tensor: Tensor) -> Tensor:
    """The tensor of a global name, transposed if the two libraries store it differently.

    The same function converts in both directions.
    """
    return tensor.t() if name.startswith("block") and tensor.dim() == 2 else tensor


def start_from_gpt2(model: Model, file: WeightFile, config: GptConfig) -> Model:
    """A copy of a GPT that starts at a file, whose names are ours or those of transformers.

    In the latter case the config.json beside the file, if there is one, is compared with the
    settings: no shape tells the number of heads, for example.

    Raises ConfigError if the settings differ from those of the file, DataError if the file is
    of a model that our GPT cannot represent, and what `start_from` raises.
    """
    if _OUR_OWN in file.shapes:
        return start_from(model, file, new=config.new)
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        theirs = from_gpt2(beside, read_json(beside))
        refuse_other_sizes(beside, theirs, config)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in file.shapes) else ""
    return start_from(
        model,
        file,
        named=partial(gpt2_name, prefix=prefix),
        convert=turned,
        ignored=lambda name: _CAUSAL_MASK.fullmatch(name) is not None,
        new=config.new,
    )
