"""python -m smollm2.judge FOLDER TEXTS …: transformers' evaluation of a model, as JSON on the
screen.

The evaluation is independent of axsparse: it reads the exported folder and the held-out texts.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 1_024
"""Tokens of a window, each evaluated by itself."""
MOST_WINDOWS = 8
"""Windows of each text, evenly spread."""


def perplexity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """exp of the mean cross entropy of all tokens but the first of each window, from (N,)."""
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    count = min(len(windows), MOST_WINDOWS)
    chosen = windows[[i * len(windows) // count for i in range(count)]]
    total = 0.0
    with torch.no_grad():
        for window in chosen:
            logits = model(window[None]).logits[0, :-1].float()
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(total / (count * (WINDOW - 1)))


def documents(path: Path) -> str:
    """The documents of a JSONL file one after the other, or all of a text file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join(json.loads(line)["text"] for line in text.splitlines())


def main() -> None:
    folder, *paths = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = {}
    for path in paths:
        text = documents(path)
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        assert tokenizer.decode(ids) == text, f"{path} does not survive the tokenizer"
        found[path.name.partition(".")[0]] = perplexity(model, ids)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    zeros = sum(int((p == 0).sum()) for p in matrices) / sum(p.numel() for p in matrices)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"perplexity": found, "zeros": zeros, "parameters": parameters}))


if __name__ == "__main__":
    main()
