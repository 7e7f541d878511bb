"""How fast pruned models decode from their kept entries: python benchmarks/decode.py [--only TEXT].

Everything takes turns in one process on one thread, in seconds of CPU. Products of one and four
tokens: ours, torch's bf16 and fp32 linear layer, and a dense bf16 loop in the manner of ours, which
is the yardstick of what sparsity alone gives. Models, greedy, after a prompt of 32 tokens, in
transformers: SmolLM2-135M (--folder, or random weights of its shapes), a Llama with eight layers of
2,048 and one with sixteen (1.0B), at random. Linear layers but the head are pruned: the smallest
weights of a folder, others at random. With --beside, others decode GGUF files of the folder's
model meanwhile. --agreement compares the tokens that a pruned folder's model chooses in bf16, from
kept entries and in fp32. Rows that are not measured anew stay in results/decode.json, of a
processor that multiplies bf16 in results/decode_avx512.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numba
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from figures import Figure, figure, host_machine, rounded
from smollm2.judge import documents
from torch import Tensor

from axsparse.samo.host.compiled_loops import has_bf16_loops
from axsparse.samo.host.kept_matrix import KeptMatrix
from axsparse.samo.pruned_weight import PrunedWeight, accelerate, multiplied_weights

SHAPES = ((576, 576), (1536, 576), (2048, 2048), (8192, 2048))
SPARSITIES = (0.5, 0.7, 0.9)
ROUNDS = 9
OUT_OF_CACHE = 400_000_000
"""Bytes of weights, in bf16, that a round goes over."""
PROMPT = 32
PLACES, WINDOWS = 100, 6
"""Places of a window at which tokens are compared, and windows of a text."""
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA_8: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LLAMA_1B = {**LLAMA_8, "num_hidden_layers": 16, "tie_word_embeddings": True}
MODELS: Mapping[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (SMOLLM2, 64),
    "Llama-0.6B": (LLAMA_8, 16),
    "Llama-1.0B": (LLAMA_1B, 16),
}
"""Settings, and tokens that are generated."""


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
        "encoding": ours[0].encoding.name,
    }


def milliseconds_a_token(model: Any, prompt: Tensor, tokens: int) -> float:
    """Milliseconds of CPU of a token after the prompt."""
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    taken = []
    for number in (1, 1 + tokens):
        began = time.process_time()
        model.generate(prompt, max_new_tokens=number, min_new_tokens=number, **how)
        taken.append(time.process_time() - began)
    return 1e3 * (taken[1] - taken[0]) / tokens


def prune(model: Any, sparsity: float, *, at_random: bool) -> Any:
    """Prune the linear layers of a model, but its head."""
    head = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(5)
    for _, _, weight, _ in multiplied_weights(model):
        if weight.shape != head.shape:
            score, least = torch.rand(weight.shape, generator=generator), sparsity
            if not at_random:
                score = weight.detach().abs().float()
                least = float(score.flatten().kthvalue(int(sparsity * score.numel())).values)
            weight.data.masked_fill_(score <= least, 0)
    return model


@torch.no_grad()
def logits_by_token(model: Any, text: Tensor) -> Tensor:
    """Logits at the last `PLACES` of a text, each computed alone with a cache."""
    begin = text.shape[1] - PLACES
    cache, found = model(text[:, :begin], use_cache=True).past_key_values, []
    for place in range(begin, text.shape[1]):
        step = model(text[:, place : place + 1], past_key_values=cache, use_cache=True)
        found.append(step.logits[0, -1].float())
    return torch.stack(found)


def agreement(folder: Path, path: Path) -> dict[str, int]:
    """Places of a text at which a pruned folder's model chooses one token, two ways each."""
    dense, words = folder_model(folder)
    ids = words(documents(path), return_tensors="pt")["input_ids"]
    starts = range(0, ids.shape[1] - PROMPT - PLACES, ids.shape[1] // WINDOWS)
    ways = {"bf16": dense, "ours": accelerate(folder_model(folder)[0])}
    ways["fp32"] = copy.deepcopy(dense).float()
    chosen = {
        name: torch.cat(
            [
                logits_by_token(model, ids[:, start : start + PROMPT + PLACES]).argmax(1)
                for start in starts
            ]
        )
        for name, model in ways.items()
    }
    pairs = itertools.combinations(chosen, 2)
    same = {f"{a} and {b}": int((chosen[a] == chosen[b]).sum()) for a, b in pairs}
    return {"places": len(chosen["ours"]), **same}


class Others:
    """Another program in a process of another Python, which takes turns by lines of text."""

    def __init__(self, name: str, python: str, *paths: str, tokens: int) -> None:
        files = [Path(path) for path in paths]
        self.files = {f"{name} {file.stem.rpartition('.')[2]}": file for file in files}
        script = Path(__file__).parent / "decode_beside.py"
        self._process = subprocess.Popen(  # noqa: S603 - what the user names
            [python, script, str(PROMPT), str(tokens), *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def milliseconds_a_token(self, name: str) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print([*self.files].index(name), file=stdin, flush=True)
        return float(stdout.readline())


# Reason: a model, how long it decodes, and who else does.
def models(base: Any, batch: int, tokens: int, at_random: bool, others: list[Others]) -> Any:
    """One model: milliseconds of a token, speed over transformers in bf16 and fp32."""
    vocabulary, is_large = base.config.vocab_size, base.num_parameters() > 900e6
    prompt = torch.randint(vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(3))
    rows: dict[str, Any] = {}

    def pruned_to(sparsity: float) -> Any:
        fast = accelerate(prune(copy.deepcopy(base), sparsity, at_random=at_random))
        row = rows.setdefault(f"{sparsity:.0%}", {})
        weights = [one for one in fast.parameters() if isinstance(one, PrunedWeight)]
        held, whole = sum(one.compressed_bytes for one in weights), sum(w.numel() for w in weights)
        row["bytes of pruned layers / dense"] = rounded(held / (2 * whole))
        return fast

    contenders: dict[str, Callable[[], Any]] = {"bf16": lambda: base}
    if not is_large:
        contenders["fp32"] = lambda: copy.deepcopy(base).float()
    contenders |= {f"{each:.0%}": partial(pruned_to, each) for each in SPARSITIES}

    def turn(name: str) -> float:
        """Made anew for each turn, so that two models are in memory and not five."""
        model = contenders[name]()
        sizes = [getattr(one, "compressed_bytes", one.nbytes) for one in model.parameters()]
        rows.setdefault(name, {})["MB"] = rounded(sum(sizes) / 1e6)
        return milliseconds_a_token(model, prompt, tokens)

    turns = {name: partial(turn, name) for name in contenders}
    for other in others:
        for name, file in other.files.items():
            turns[name] = partial(other.milliseconds_a_token, name)
            rows[name] = {"MB": rounded(file.stat().st_size / 1e6)}
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(3):
        for name, run in turns.items():
            taken[name].append(run())
    for name, values in taken.items():
        rows[name]["ms a token"] = figure("ms", values).row()
        for dense in {"bf16", "fp32"} & {*rows}:
            ratios = [theirs / ours for theirs, ours in zip(taken[dense], values, strict=True)]
            rows[name][f"speed over {dense}"] = figure("×", ratios).row()
    return rows


def folder_model(folder: Path) -> tuple[Any, Any]:
    """The dense model of a folder in bf16, and its tokenizer."""
    kind: Any = transformers.AutoModelForCausalLM
    words: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.bfloat16).eval(), words


def random_model(settings: Mapping[str, Any]) -> Any:
    """A dense Llama in bf16."""
    kind: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**settings, bos_token_id=0, eos_token_id=None)
    return kind.from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    add = arguments.add_argument
    add("--out", type=Path, default=Path(__file__).parent / "results")
    add("--only", nargs="+", default=[""], help="rows whose names have one of these texts")
    add("--folder", type=Path, help="a Hugging Face folder of SmolLM2-135M")
    add(
        "--beside",
        action="append",
        default=[],
        nargs="+",
        help="llama.cpp or OpenVINO, a Python with llama-cpp-python or openvino-genai, GGUF files",
    )
    add("--agreement", type=Path, nargs="+", default=[], help="a pruned folder, and texts")
    given = arguments.parse_args()
    silence: Any = transformers.logging.set_verbosity_error
    silence()
    torch.set_num_threads(1)
    path = given.out / f"decode{'_avx512' if has_bf16_loops() else ''}.json"
    known: Any = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    found = {"machine": host_machine(), "products": {}, "models": {}, "agreement": {}}
    if known.get("machine") == found["machine"]:
        found = known

    def save(kind: str, name: str, row: Any) -> None:
        found[kind][name] = row
        print(name, json.dumps(row, ensure_ascii=False), flush=True)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def is_asked(name: str) -> bool:
        return any(text in name for text in given.only)

    for text in given.agreement[1:]:
        save("agreement", text.name, agreement(given.agreement[0], text))
    for tokens, shape, sparsity in itertools.product((1, 4), SHAPES, SPARSITIES):
        name = f"{shape[0]}×{shape[1]}, {sparsity:.0%}, {tokens} tokens"
        if is_asked(name):
            save("products", name, products(shape, sparsity, tokens))
    for name, (settings, tokens) in MODELS.items():
        batches = [batch for batch in (1, 4) if is_asked(f"{name}, batch {batch}")]
        is_folder = settings is SMOLLM2 and given.folder is not None
        if batches:
            base = folder_model(given.folder)[0] if is_folder else random_model(settings)
        for batch in batches:
            beside = given.beside if is_folder and batch == 1 else ()
            others = [Others(*words, tokens=tokens) for words in beside]
            row = models(base, batch, tokens, not is_folder, others)
            save("models", f"{name}, batch {batch}", row)


if __name__ == "__main__":
    main()
