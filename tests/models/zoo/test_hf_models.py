"""Models of Hugging Face's transformers by its own modules: every family beside transformers alone.

A family's test goes the whole way: logits, five steps, stages, recomputation, pruning, the exported
folder and its text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.hf import (
    STEPS,
    config_from,
    hf_logits,
    hf_losses,
    our_logits,
    saved_model,
    tokens,
)
from support.resuming import train_and_save
from support.runs import VOCABULARY, assert_bitwise, token_data, train_in_process
from torch import Tensor

from axsparse.config.load import made_in_python
from axsparse.models.zoo.model_registry import named_model
from axsparse.training.saved_model import Sampling, continuation, open_saved_model

LOSS_RTOL = 2e-6
"""The squares of the norm and the gradients of a tied weight are added in another order, which
every AdamW step carries on."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLDER = {
    **{"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 24, "n_inner": 52},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    **{"head_dim": 12, "sliding_window": 5},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 3.0},
            "original_max_position_embeddings": 20,
        }
    },
    "gemma2": {**MIXED, "query_pre_attn_scalar": 12},
    "mixtral": {"num_local_experts": 4},
    "mistral": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "gemma": {"head_dim": 12},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 12},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_neox": {},
    "starcoder2": {
        **{"sliding_window": 5, "hidden_dropout": 0.0, "residual_dropout": 0.0},
        "embedding_dropout": 0.0,
    },
    "glm4": {"head_dim": 12},
    "granite": {
        **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
        "attention_multiplier": 0.3,
    },
    "cohere2": MIXED,
    "stablelm": {"partial_rotary_factor": 0.5},
    "nemotron": {},
    "exaone4": {},
    "seed_oss": {"head_dim": 12},
    "deepseek_v3": {
        **{"moe_intermediate_size": 20, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        **{"num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "first_k_dense_replace": 1},
        "num_key_value_heads": 4,
    },
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**EXPERTS, "head_dim": 12, "moe_intermediate_size": 20},
    "olmoe": EXPERTS,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **{**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "opt": {"ffn_dim": 52, "dropout": 0.0, "word_embed_proj_dim": 48},
    "falcon": {
        **{"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
        **{"bias": False, "alibi": False},
    },
    "bloom": {"n_layer": 3, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mpt": {"d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 24},
    "gpt2": OLDER,
    "gptj": {**OLDER, "rotary_dim": 4},
}
USUAL = 3
"""How many of them, from the first on, are run by default."""


def make(transformers: Any, family: str, path: Path, **changed: Any) -> Any:
    """A small model of a family with random parameters, in a folder."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    return saved_model(transformers, kind(**{**SIZES, **FAMILIES[family], **changed}), path)


def settings_of(folder: Path, family: str, **sections: Any) -> Any:
    """A configuration that begins at a folder, with enough layers for three stages."""
    longest = {} if family not in ("bloom", "mpt") else {"sequence_length": 24}
    return config_from(folder, model={"name": "hf", "from": str(folder), **longest}, **sections)


@pytest.mark.parametrize("family", by_default(list(FAMILIES)[:USUAL], FAMILIES))
def test_a_family_computes_trains_and_writes_as_transformers_does(
    transformers: Any, family: str, tmp_path: Path
) -> None:
    theirs = make(transformers, family, tmp_path / "start")
    config = settings_of(tmp_path / "start", family)
    model, data = named_model(made_in_python(config, "tiny")), token_data()

    assert torch.equal(our_logits(model, config, tokens()), hf_logits(theirs))
    [(_, reference)] = train_in_process(1, 1, model, config, data)
    for g_inter in (2, 3):
        for _, trace in train_in_process(g_inter, 1, model, config, data):
            assert_bitwise(trace, reference)

    # Pruned, cut in three, with backwards in two parts and layers computed again.
    pruned = settings_of(tmp_path / "start", family, pruning={"sparsity": 0.9})
    other = settings_of(
        tmp_path / "start",
        family,
        pruning={"sparsity": 0.9},
        pipeline={"checkpoint_activations": 1, "split_backward": True},
    )
    [(trainer, reference_pruned)] = train_in_process(1, 1, model, pruned, data)
    states = [state for layer in trainer.parts.layers for state in layer.state.owned]
    matrices = [one for one in states if one.kept < one.parameter.numel()]
    names = [one.name for one in matrices]
    assert len(matrices) >= 3 * 4
    assert not any("router" in name or "mlp.gate.weight" in name for name in names)
    assert ("experts" in str(list(theirs.state_dict()))) == ("experts" in str(names))
    for one in matrices:
        assert one.kept == pytest.approx(0.1 * one.parameter.numel(), rel=0.03), one.name
    for _, trace in train_in_process(3, 1, model, other, data):
        assert_bitwise(trace, reference_pruned)

    masters = train_and_save((2, 1), model, pruned, tmp_path / "ours")
    out, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    state = out.state_dict()
    for name in masters.keys() & state.keys():  # A file has no buffers that are computed.
        assert torch.equal(state[name], masters[name]), name
    again = settings_of(tmp_path / "ours", family)
    logits = our_logits(named_model(made_in_python(again, "tiny")), again, tokens())
    assert torch.equal(logits, hf_logits(out.eval()))
    saved = open_saved_model(tmp_path / "ours-run", None, trained=False)
    written = list(continuation(saved, tokens()[0, :4].tolist(), 6, -1, Sampling()))
    assert written == greedy(out, tokens()[:1, :4], 6)

    # Training changes the model of transformers, so that it comes last.
    expected = list(hf_losses(theirs, config))
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.05
    assert reference.losses == pytest.approx(expected, rel=LOSS_RTOL)


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, count: int) -> list[int]:
    """What transformers' own generation adds to a prompt."""
    model.generation_config.eos_token_id = None
    text = model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return text[0, prompt.shape[1] :].tolist()
