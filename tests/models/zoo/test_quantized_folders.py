"""Published folders of quantized weights: the call that their refusal names makes others of real
numbers, which train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exhaustive import by_default
from support.hf import config_from, hf_logits, our_logits, saved_model, tokens
from support.runs import VOCABULARY, token_data, train_in_process
from torch import Tensor

from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import DataError

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY},
    **{"max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0},
}
OF_GPT_OSS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of E2M1 without their signs."""
BLOCK = 16


def four_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the experts' matrices by random ones in MXFP4; returns those as numbers."""
    generator, numbers = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        pairs = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": pairs, f"{name}_scales": scales}
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).int()
        values = FOUR_BITS[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        scaled = values * 2.0 ** (scales.unsqueeze(-1).float() - 127)
        numbers[name] = scaled.view(experts, outputs, inputs).transpose(1, 2)
    return numbers


def eight_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the linear layers' matrices by ones of E4M3 with a scale for each block."""
    numbers = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        scales = blocks.abs().amax((-2, -1)) / 448
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        tensors[name] = (tensors[name] / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        numbers[name] = tensors[name].float() * spread
    return numbers


KINDS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "mxfp4": (
        *("gpt_oss", OF_GPT_OSS, four_bits),
        {"modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]},
    ),
    "fp8": (
        *("llama", {}, eight_bits),
        {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"},
    ),
}


@pytest.mark.parametrize("kind", by_default(["mxfp4"], KINDS))
def test_the_call_of_the_refusal_makes_a_folder_that_trains(
    kind: str, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, own, quantize, settings = KINDS[kind]
    folder, other = tmp_path / "model", tmp_path / "numbers"
    saved_model(transformers, transformers.AutoConfig.for_model(family, **SIZES, **own), folder)
    tensors = load_file(folder / "model.safetensors")
    numbers = quantize(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = json.loads((folder / "config.json").read_text())
    theirs["quantization_config"] = {"quant_method": kind, **settings}
    (folder / "config.json").write_text(json.dumps(theirs))

    with pytest.raises(DataError) as refused:
        config_from(folder)
    call = re.search(
        "write one in bf16: (.*), of transformers with accelerate$", str(refused.value)
    )
    assert call is not None, refused.value
    # Asked for by transformers before it reads eight bits, and not used here.
    quantizer = transformers.quantizers.quantizer_finegrained_fp8
    monkeypatch.setattr(quantizer, "is_accelerate_available", lambda *_: True)
    names = {name: getattr(transformers, name) for name in re.findall(r"[A-Z]\w+(?=[.(])", call[1])}
    exec(call[1], {**names, "FOLDER": folder, "OTHER": other})  # noqa: S102 - the line is ours

    found = open_weights(other)
    assert len(numbers) == {"mxfp4": 4, "fp8": 14}[kind]
    for name, values in numbers.items():
        torch.testing.assert_close(found.read(name).float(), values, rtol=2**-8, atol=0)
    config = config_from(other, pruning={"sparsity": 0.5})
    model = named_model(config)
    judge = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    start = config.with_values({"pruning.sparsity": 0.0})
    assert torch.equal(our_logits(model, start, tokens()), hf_logits(judge))
    [(_, trace)] = train_in_process(1, 1, model, config, token_data())
    assert trace.losses[-1] < trace.losses[0]
