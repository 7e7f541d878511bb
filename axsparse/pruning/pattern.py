"""N:M masks: N of every M neighbours stay, as sparse tensor cores need them (2:4)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from axsparse.runtime.errors import ConfigError

CHUNK = 131_072
"""Entries that are sorted at a time, in whole rows; this bounds temporaries to some 5 MB."""


def n_of_m(score: Tensor, n: int, m: int) -> Tensor:
    """The bool mask, in the shape of `score`, of the n largest of every m consecutive inputs.

    Inputs are dimension 1 of a Linear (out, in) and of a Conv (out, in, kh, kw), where each place
    of the kernel counts by itself. Among equal scores, those at lower positions stay. `score` has
    no NaN, and m divides its dimension 1.
    """
    rows, inputs = score.shape[:2]
    assert inputs % m == 0, "check_pattern was not asked"
    mask = torch.zeros(score.shape, dtype=torch.bool)
    grouped = (rows, inputs // m, m, -1)
    score, grouped_mask = score.reshape(grouped), mask.view(grouped)
    step = max(1, CHUNK * rows // mask.numel())
    for part, kept in zip(score.split(step), grouped_mask.split(step), strict=True):
        order = part.sort(dim=2, descending=True, stable=True).indices
        kept.scatter_(2, order[:, :, :n], True)
    return mask


def crowded_groups(stays: Tensor, n: int, m: int) -> int:
    """How many groups of m consecutive inputs have more than n True entries.

    `stays` is bool in the shape of a tensor, as in `n_of_m`.
    """
    rows, inputs = stays.shape[:2]
    assert inputs % m == 0, "check_pattern was not asked"
    return int((stays.reshape(rows, inputs // m, m, -1).sum(2) > n).sum())


def parse_pattern(text: str) -> tuple[int, int]:
    """The two numbers of a pattern such as "2:4"; ConfigError for any other text."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    n, m = map(int, found.groups()) if found else (0, 0)
    if not 0 < n < m:
        raise ConfigError(
            f"pruning.pattern: {text!r} is not N:M with 0 < N < M; write 2:4 to keep two of "
            "every four"
        )
    return n, m


def check_pattern(name: str, shape: tuple[int, ...], n: int, m: int) -> None:
    """ConfigError unless `m` divides dimension 1 of the tensor, its inputs."""
    if shape[1] % m:
        raise ConfigError(
            f"{name}: {n}:{m} runs along dimension 1 of its shape {shape}, which is not a "
            f"multiple of {m}; name it in pruning.exclude"
        )
