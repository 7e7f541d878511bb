"""How fast pruned models decode from their kept entries: python benchmarks/decode.py [--out NAME].

Everything takes turns in one process on one thread, in seconds of CPU. Products of one and four
tokens: ours, torch's bf16 and fp32 linear layer, and a dense bf16 loop in the manner of ours, which
is the yardstick of what sparsity alone gives. Models of random weights: the shapes of SmolLM2-135M
and of a Llama with eight layers of 2,048, greedy, 64 tokens after a prompt of 32, in transformers;
or, with --folder, a Hugging Face folder. Linear layers but the head are pruned at random.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numba
import numpy as np
import torch
import torch.nn.functional as F
from figures import Figure, figure, host_machine
from torch import Tensor

from axsparse.samo.host.kept_matrix import KeptMatrix
from axsparse.samo.pruned_weight import PrunedWeight, accelerate, multiplied_weights

SHAPES = ((576, 576), (1536, 576), (2048, 2048), (8192, 2048))
SPARSITIES = (0.5, 0.7, 0.9)
ROUNDS = 9
OUT_OF_CACHE = 64_000_000
"""Bytes of weights, in bf16, that a round goes over."""
PROMPT, TOKENS = 32, 64
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def dense_rows(weight: Any, x: Any, out: Any) -> None:
    """A dense product of bf16 weights, by their bits, with one token in fp32."""
    for row in range(weight.shape[0]):
        total = np.float32(0)
        for column in range(weight.shape[1]):
            bits = np.uint32(np.uint32(weight[row, column]) << np.uint32(16))
            total += bits.view(np.float32) * x[column]
        out[row] = total


def pruned(rows: int, columns: int, sparsity: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator).bfloat16()
    return dense.masked_fill_(torch.rand(rows, columns, generator=generator) < sparsity, 0)


def in_turn(contenders: Mapping[str, Callable[[], object]], per: int) -> dict[str, list[float]]:
    """Microseconds of CPU of each contender in every round, for one of `per`."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, ROUNDS):
        for name, run in contenders.items():
            began = time.process_time()
            run()
            if number >= 0:
                taken[name].append(1e6 * (time.process_time() - began) / per)
    return taken


def over(taken: Mapping[str, list[float]], name: str) -> Figure:
    """How many times as long as ours another contender takes, in each round."""
    pairs = zip(taken[name], taken["ours"], strict=True)
    return figure(f"{name} / ours", [theirs / ours for theirs, ours in pairs])


def products(shape: tuple[int, int], sparsity: float, tokens: int) -> dict[str, Any]:
    """One row: the time of ours, of the others over it, and bytes over dense bf16."""
    rows, columns = shape
    number = max(1, OUT_OF_CACHE // (2 * rows * columns))
    dense = [pruned(rows, columns, sparsity, seed) for seed in range(number)]
    wide = [one.float() for one in dense[: max(1, number // 2)]]
    bits = [one.view(torch.int16).numpy().view(np.uint16) for one in dense]
    ours = [KeptMatrix(one) for one in dense]
    x = torch.randn(tokens, columns).bfloat16()
    single, out = x[0].float().numpy(), np.empty(rows, np.float32)
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: [one.multiply(x) for one in ours],
        "torch bf16": lambda: [F.linear(x, one) for one in dense],
    }
    if tokens == 1:
        contenders["own dense"] = lambda: [dense_rows(one, single, out) for one in bits]
    taken = in_turn(contenders, number)
    x_wide = x.float()
    taken["torch fp32"] = in_turn(
        {"torch fp32": lambda: [F.linear(x_wide, one) for one in wide]}, len(wide)
    )["torch fp32"]
    return {
        "ours": figure("µs", taken["ours"]).row(),
        **{f"{name} / ours": over(taken, name).row() for name in taken if name != "ours"},
        "bytes / dense": round(ours[0].nbytes / dense[0].nbytes, 4),
        "encoding": ours[0].encoding,
    }


def seconds_a_token(model: Any, prompt: Tensor) -> float:
    """CPU seconds of a token after the prompt."""
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    taken = []
    for tokens in (1, 1 + TOKENS):
        began = time.process_time()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **how)
        taken.append(time.process_time() - began)
    return (taken[1] - taken[0]) / TOKENS


def models(base: Any, vocabulary: int, batch: int) -> dict[str, Any]:
    """One model: milliseconds of a token, speed over transformers in bf16 and fp32, agreement."""
    prompt = torch.randint(vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(3))
    head = base.get_output_embeddings().weight
    contenders: dict[str, Any] = {"bf16": base, "fp32": copy.deepcopy(base).float()}
    found: dict[str, Any] = {}
    for sparsity in SPARSITIES:
        dense = copy.deepcopy(base)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for _, name, weight, _ in multiplied_weights(dense):
                if weight.shape != head.shape:
                    drawn = torch.rand(weight.shape, generator=generator)
                    base_weight = base.get_parameter(name)
                    weight.copy_(base_weight.masked_fill(drawn < sparsity, 0))
        text = torch.randint(vocabulary, (1, 96), generator=generator)
        with torch.no_grad():
            wanted = [dense(text[:, : 1 + n]).logits[0, -1].argmax() for n in range(80, 96)]
        fast: Any = accelerate(dense)
        cache: Any = None
        same = 0
        with torch.no_grad():
            cache = fast(text[:, :80], use_cache=True).past_key_values
            for n in range(80, 96):
                step = fast(text[:, n : n + 1], past_key_values=cache, use_cache=True)
                same += int(step.logits[0, -1].argmax() == wanted[n - 80])
        weights = [one for one in fast.parameters() if isinstance(one, PrunedWeight)]
        found[f"{sparsity:.0%}"] = {
            "same tokens of 16": same,
            "bytes of pruned layers / dense": round(
                sum(one.compressed_bytes for one in weights)
                / sum(2 * one.numel() for one in weights),
                4,
            ),
        }
        contenders[f"{sparsity:.0%}"] = fast
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3):
        for name, model in contenders.items():
            taken[name].append(1e3 * seconds_a_token(model, prompt))
    rows: dict[str, Any] = {"bf16": {}, "fp32": {}, **found}
    for name, values in taken.items():
        rows[name]["ms a token"] = figure("ms", values).row()
        for other in ("bf16", "fp32"):
            ratios = [theirs / ours for theirs, ours in zip(taken[other], values, strict=True)]
            rows[name][f"speed over {other}"] = figure("×", ratios).row()
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments.add_argument("--folder", type=Path, help="a Hugging Face folder in place of SmolLM2")
    given = arguments.parse_args()
    import transformers

    torch.set_num_threads(1)
    quiet: Any = transformers.logging.set_verbosity_error
    quiet()
    found: dict[str, Any] = {"machine": host_machine(), "products": {}, "models": {}}
    for tokens in (1, 4):
        for shape in SHAPES:
            for sparsity in SPARSITIES:
                row = products(shape, sparsity, tokens)
                name = f"{shape[0]}×{shape[1]}, {sparsity:.0%}, {tokens} tokens"
                found["products"][name] = row
                print(name, {key: one["median"] for key, one in row.items() if type(one) is dict})
    for name, settings in (("SmolLM2-135M", SMOLLM2), ("Llama of 8 × 2,048", LLAMA)):
        torch.manual_seed(7)
        base: Any
        if given.folder is not None and settings is SMOLLM2:
            base = transformers.AutoModelForCausalLM.from_pretrained(
                given.folder, dtype=torch.bfloat16
            )
        else:
            config = transformers.LlamaConfig(**settings, bos_token_id=0, eos_token_id=None)
            build: Any = transformers.AutoModelForCausalLM.from_config
            base = build(config, dtype=torch.bfloat16)
        for batch in (1, 4):
            row = models(base.eval(), settings["vocab_size"], batch)
            found["models"][f"{name}, batch {batch}"] = row
            print(
                name,
                batch,
                json.dumps({key: one["ms a token"]["median"] for key, one in row.items()}),
            )
    path = given.out / "decode.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
