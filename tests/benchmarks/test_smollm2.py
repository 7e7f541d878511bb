"""The pieces of the study of SmolLM2: what it reads, how it judges, what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from smollm2.cases import parted
from smollm2.gguf_folder import turned
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


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.zeros(*tokens.shape, 37))

    assert perplexity(Uniform(), torch.arange(5_000) % 37) == pytest.approx(37, rel=1e-5)
