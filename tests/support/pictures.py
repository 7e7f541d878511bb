"""Small models of transformers that take texts and pictures, at random values, with a text model
in each."""

from __future__ import annotations

from typing import Any

import torch
from support.runs import VOCABULARY

TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
    },
    "gemma4": {
        "text_config": {
            **{**TEXT, "sliding_window": 8, "hidden_size_per_layer_input": 0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2},
    },
    "llama4": {
        "text_config": {
            **{**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2},
            "num_experts_per_tok": 1,
        },
        "vision_config": {
            **{**VISION, "vision_output_dim": 16, "projector_input_dim": 16},
            "projector_output_dim": 16,
        },
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 10,
    },
    "qwen3_5": {
        "text_config": {
            **{**TEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
            **{"out_hidden_size": 32, "patch_size": 14},
        },
    },
}


def saved_with_pictures(transformers: Any, family: str, folder: Any) -> Any:
    """One of the models, saved in bf16."""
    torch.manual_seed(3)
    settings = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForImageTextToText.from_config(settings, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()
