"""Writes the GGUF file of a small Llama as a Hugging Face folder: settings, weights, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""The token type of special tokens."""


def write_folder(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (fp32), tokenizer.json and tokenizer_config.json.

    `path` is a file of architecture "llama" with a byte-level tokenizer. Quantized tensors are
    written as the numbers that they stand for.
    """
    from gguf import GGUFReader, dequantize  # of this benchmark's own environment

    reader = GGUFReader(path)
    about = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(about)
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        weights[_hf_name(tensor.name)] = turned(tensor.name, values, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    make_tokenizer(about).save(str(folder / "tokenizer.json"))
    words = about["tokenizer.ggml.tokens"]
    end = words[about["tokenizer.ggml.unknown_token_id"]]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}),
        encoding="utf-8",
    )


def _config(about: dict[str, Any]) -> dict[str, Any]:
    """The settings, as transformers names them."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "max_position_embeddings": about["llama.context_length"],
        "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": about["llama.rope.freq_base"],
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _hf_name(name: str) -> str:
    """The name of a tensor in transformers."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{INSIDE[parts[2]]}.{parts[3]}"
    return f"{OUTSIDE[parts[0]]}.{parts[1]}"


def turned(name: str, values: Tensor, config: dict[str, Any]) -> Tensor:
    """The values in the order of transformers.

    In GGUF the two entries of a pair that turns with the position are neighbours, (2i, 2i + 1); in
    transformers they are half a head apart, (i, i + D / 2).
    """
    which = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    if kind not in which:
        return values
    heads, (rows, columns) = config[which[kind]], values.shape
    pairs = values.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def make_tokenizer(about: dict[str, Any]) -> Tokenizer:
    """Byte-level byte-pair encoding in which each digit is a token (`tokenizer.ggml.pre`)."""
    if about["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"only SmolLM's splitting is known, not {about['tokenizer.ggml.pre']}")
    words = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, about["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in kinds
            if kind == CONTROL
        ]
    )
    return tokenizer
