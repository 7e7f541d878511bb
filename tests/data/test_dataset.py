"""Samples that tell their documents apart."""

from __future__ import annotations

import numpy as np
import torch

from axsparse.data.dataset import TokenDataset

TOKENS = np.array([5, 6, 0, 7, 0, 0, 8, 9, 1, 2, 0, 3, 4], np.uint8)


def test_each_token_says_where_in_its_sample_its_document_begins() -> None:
    (tokens, starts), targets = TokenDataset("t", "0", 10, TOKENS, 6, separator=0).read(
        np.array([0, 1])
    )

    assert tokens.tolist() == [[5, 6, 0, 7, 0, 0], [8, 9, 1, 2, 0, 3]]
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 0, 5]]
    assert starts.dtype == torch.int32
    assert targets.tolist() == [[6, 0, 7, 0, 0, 8], [9, 1, 2, 0, 3, 4]]


def test_without_a_separator_there_is_one_input() -> None:
    inputs, _ = TokenDataset("t", "0", 10, TOKENS, 6).read(np.array([0]))

    assert len(inputs) == 1
