"""The pieces of the study of SmolLM2: what it reads, how it judges, what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from smollm2.__main__ import remarks, table
from smollm2.cases import Case, all_cases, parted
from smollm2.gguf_folder import make_tokenizer, turned
from smollm2.judge import perplexity


def test_no_paragraph_is_trained_on_and_held_out() -> None:
    shared = "the same licence in all packages " * 3
    documents = {f"package {n}": f"only in {n} {'x' * n}\n\n{shared}" for n in range(40)}

    training, held_out = parted(documents)

    assert len(training) + len(held_out) == 40
    assert 1 <= len(held_out) < 12
    assert all(shared in text for text in held_out)
    assert not any(shared in text for text in training)
    assert all(text.startswith("only in") for text in training)


def test_pairs_of_queries_and_keys_move_half_a_head_apart() -> None:
    """Rows 2i and 2i + 1 of a head in GGUF are rows i and i + D / 2 in transformers."""
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rows = torch.arange(8.0).unsqueeze(1).expand(8, 3)

    assert turned("blk.0.attn_q.weight", rows, config)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert turned("blk.0.attn_k.weight", rows, config)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert turned("blk.0.attn_v.weight", rows, config) is rows


def test_the_tokenizer_gives_every_text_back_and_digits_one_by_one() -> None:
    from tokenizers import pre_tokenizers

    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab"]
    made = make_tokenizer(
        {
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [3] + [1] * (len(words) - 1),
            "tokenizer.ggml.merges": ["1 2", "a b"],
        }
    )
    text = "ab 12\n\té 'ab' <|end|>"

    encoded = made.encode(text)

    assert made.decode(encoded.ids, skip_special_tokens=False) == text
    assert {"ab", "1", "2", "<|end|>"} <= {*encoded.tokens}
    assert "12" not in encoded.tokens


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.zeros(*tokens.shape, 37))

    assert perplexity(Uniform(), torch.arange(5_000) % 37) == pytest.approx(37, rel=1e-5)


def test_the_table_has_a_line_for_each_case_that_is_judged() -> None:
    judged = {"perplexity": {"english": 15.57, "code": 4.1}, "state_bytes": 2e9}
    single = Case("sparsegpt", 60, 1)
    records: dict[Case, dict[str, Any]] = {
        Case("dense", 0): judged,
        Case("wanda", 60): {**judged, "state_bytes": 1.4e9},
        Case("wanda", 60, 2): {"perplexity": {"english": 1234.5}, "losses": [2.0, 1.0]},
        single: {"losses": [2.0, 1.0]},
        Case("sparsegpt", 60, 2): {"losses": [2.0, 1.0]},
    }

    lines = list(table(records))[2:]

    assert lines == [
        "| dense | 0 | no | 15.6 | 4.1 |  | 2.000 GB | 1.000 |",
        "| wanda | 60 | no | 15.6 | 4.1 |  | 1.400 GB | 0.700 |",
        "| wanda | 60 | 2 steps, 2×1 | 1,234 |  |  | 1.400 GB | 0.700 |",
    ]
    same, missing = remarks(records)
    assert same == "All 2 losses of sparsegpt-60-1x1 are the same numbers as on two stages."
    assert single in all_cases()
    assert "magnitude-70" in missing
    assert "wanda-60-2x1" not in missing
    records[single] = {"losses": [2.0, 1.5]}
    assert next(remarks(records)).endswith("differ from those on two stages from step 2.")
