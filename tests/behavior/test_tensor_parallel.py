"""Tensor parallelism: members of a stage share its layers, with the same bits at every degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import (
    GPT,
    ONE_RANK,
    PRUNING,
    SAME_LAYOUT,
    TORCH,
    Row,
    Subject,
    judge,
    merged,
    parameters,
    steps,
)
from support.runs import random_init, summed_loss, tiny_config, tiny_gpt, token_data, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.models.tensor_parallel import Split

FOUR_HEADS = replace(
    GPT,
    name="gpt of four heads",
    settings={"batch": {"microbatch_size": 4}, "model": {"num_heads": 4}},
)
TOLERANCE = (3e-7, 1e-6)
"""Sums over chunks in place of one product: 1.2e-7 and 1e-7 were the most seen over three steps."""


def members(number: int, **others: Any) -> dict[str, Any]:
    return merged({"layout": {"g_tensor": number}}, others)


def exact(*settings: Mapping[str, Any]) -> dict[str, Any]:
    return merged({"layout": {"tensor_exact": True}}, steps(2), *settings)


def ten_steps(method: str) -> dict[str, Any]:
    return {"pruning": PRUNING[method], "schedule": {"warmup_steps": 1}, "train": {"steps": 9}}


EVALUATING = {"train": {"eval_every": 1, "eval_steps": 2}}
DEEP = {"train": {"steps": 3}}
SAME_BITS = [
    *(
        Row(layout, exact(settings), members(number, **free), ONE_RANK, FOUR_HEADS, order)
        for layout, number, settings, free, order in [
            ((1, 1), 2, EVALUATING, {}, None),
            ((2, 1), 2, {"model": {"dropout": 0.2}}, {"pipeline": {"split_backward": True}}, 1),
            ((1, 1), 4, {"model": {"tie_embeddings": False}}, {}, None),
            ((4, 1), 2, DEEP, {"pipeline": {"checkpoint_activations": 1}}, 2),
            ((2, 1), 4, DEEP, {}, 3),
            ((2, 1), 2, {"samo": {"enabled": False}}, {}, None),
            ((1, 2), 2, {"samo": {"gradient": "exact"}}, {"samo": {"shard_optimizer": True}}, None),
            ((2, 2), 2, {"samo": {"gradient": "exact"}}, {}, 4),
            ((1, 3), 4, {"samo": {"gradient": "exact"}}, {}, None),
            ((2, 1), 2, {"precision": "bf16", "optimizer": {"name": "sgd"}}, {}, None),
            (
                (2, 1),
                2,
                {"pruning": {"include": "all", "distribution": "global"}, "samo": {}},
                {"samo": {"index": "mask"}},
                5,
            ),
        ]
    ),
    *(
        Row((1 + number % 2, 1), exact(ten_steps(method)), members(2), ONE_RANK, FOUR_HEADS)
        for number, method in enumerate(PRUNING)
        if method not in ("set", "rigl")
    ),
]
USUAL = SAME_BITS[:2]


@pytest.mark.parametrize(
    "row", parameters([replace(row, is_usual=row in USUAL) for row in SAME_BITS])
)
def test_every_degree_has_the_same_bits(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"


@pytest.mark.parametrize(
    "row",
    parameters(
        Row(
            (stages, 1),
            steps(3),
            members(number, layout={"tensor_exact": is_exact}),
            TORCH,
            FOUR_HEADS,
            tolerance=TOLERANCE,
            is_usual=(stages, number, is_exact) == (1, 2, False),
        )
        for stages, number, is_exact in [(1, 2, False), (2, 2, False), (1, 4, False), (1, 1, True)]
    ),
)
def test_a_run_is_the_uncut_one_to_rounding(row: Row) -> None:
    judge(row)
