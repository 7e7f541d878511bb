"""Rows of the table on what is kept of a model: pruning, optimizers, precision and storage, and
which form of storage `auto` takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import (
    COARSE,
    GPT,
    ONE_STAGE,
    PRUNING,
    SAME_LAYOUT,
    WIDE,
    Row,
    Settings,
    axis,
    batch,
    crossed,
    judge,
    parameters,
    steps,
)
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.samo.expansion import Expansion

FEW = [(1, 1), (2, 1), (2, 2)]
TIED = axis("model", "tie_embeddings", False, True)
BF16_TOLERANCE = (0.002, math.inf)
"""bf16 has 8 bits of mantissa: a weight is off by up to 0.4 %, a mean over many by much less
(3e-4 seen)."""
FP16_TOLERANCE = (3e-4, 3e-3)
"""fp16 has three more bits than bf16 (1e-5 seen)."""
LAMB_TOLERANCE = (1e-4, 1e-4)
"""fp32 steps against fp64 ones: 1e-7 each, which early steps, where the update is about the
sign of the gradient, amplify."""

# -- pruning -----------------------------------------------------------------------------------

AT_ONCE: list[Settings] = [
    {"pruning": pruning}
    for pruning in (
        {"method": "random"},
        {"include": "all"},
        {"sparsity": 0.0},
        {"sparsity": 0.99},
        {"at_step": 3},
        {"at_step": 3, "include": "all"},
    )
]
LONG = steps(10, schedule={"warmup_steps": 1})
BY_NAME = {name: {"pruning": pruning} for name, pruning in PRUNING.items()}
METHODS = [
    *crossed(FEW, AT_ONCE, settings=steps(6)),
    *crossed([(3, 1), (2, 2)], list(BY_NAME.values()), settings=LONG),
    # A tensor of 102,400 entries has two blocks in the norm; the 20,480 that are kept have one.
    *(
        Row(layout, {**steps(5), **BY_NAME["magnitude later"], "model": {"hidden_size": 160}})
        for layout in ((2, 1), (2, 2))
    ),
    *crossed(
        [(3, 1), (2, 2)],
        [BY_NAME[name] for name in ("magnitude", "snip", "gradual", "early-bird")],
        axis("pruning", "distribution", "erk", "global"),
        settings={**LONG, "pruning": {"include": "all"}},
    ),
]

# -- precision, optimizers and storage ---------------------------------------------------------

STORED = axis("samo", "gradient", "half", "fp32")
DECAYED = steps(6, schedule={"decay": "step", "step_every": 3, "step_factor": 0.5})
LATER = axis("pruning", "at_step", 0, 3)
SGD: list[Settings] = [
    {"optimizer": {"name": "sgd", "learning_rate": 0.5, **settings}}
    for settings in ({"momentum": 0.0}, {"momentum": 0.9}, {"nesterov": True})
]
LAMB = {**DECAYED, "optimizer": {"name": "lamb", "eps": 1e-6}}
OPTIMIZERS = [
    *crossed(FEW, SGD, LATER, settings=DECAYED),
    *crossed(FEW, LATER, settings=LAMB, tolerance=LAMB_TOLERANCE),
    *crossed(
        [(2, 1), (2, 2)],
        [{"precision": precision} for precision in ("fp32", "bf16")],
        settings=LAMB,
        judge=ONE_STAGE,
    ),
    *crossed(
        [(1, 1), (3, 1), (1, 3), (2, 2)],
        STORED,
        settings={"precision": "bf16"},
        tolerance=BF16_TOLERANCE,
    ),
    *crossed(
        FEW,
        STORED,
        settings={"precision": "fp16", "loss_scale": {"growth_interval": 2}},
        tolerance=FP16_TOLERANCE,
    ),
    # AdamW would learn as much if gradients had kept the loss scale.
    Row(
        (2, 1),
        steps(4, precision="fp16", optimizer={"name": "sgd", "learning_rate": 0.5}),
        tolerance=FP16_TOLERANCE,
    ),
]

SHARDED = {"samo": {"zero_stage": 1}}
WIDE_STATE: list[Settings] = [
    {"precision": "bf16"},
    {"precision": "bf16", "samo": {"gradient": "fp32"}},
    {"precision": "bf16", "samo": {"index": "mask", "gradient": "half"}},
    {"precision": "fp16", "loss_scale": {"initial": 1024.0}},
    {"optimizer": {"name": "lamb", "learning_rate": 1e-3}},
    {"optimizer": {"name": "sgd", "nesterov": True}},
    {"samo": {"enabled": False}},
]


def stored(rows: list[Row], free: Settings) -> list[Row]:
    """The same rows, with the same layout without some free settings as the reference."""
    return [replace(row, free=free, judge=SAME_LAYOUT) for row in rows]


STORAGE = [
    *stored(
        crossed(
            [(1, 2), (1, 3), (1, 4), (2, 2), (3, 2)], axis("pruning", "at_step", 0, 2), subject=WIDE
        ),
        SHARDED,
    ),
    *stored(crossed([(2, 3)], WIDE_STATE, axis("pruning", "at_step", 0, 2), subject=WIDE), SHARDED),
    # Layers with fewer blocks than replicas, and a weight with two uses.
    *stored(
        crossed(
            [(1, 2), (2, 2), (1, 4)], TIED, settings={"pruning": {"include": "all", "at_step": 2}}
        ),
        SHARDED,
    ),
    *(
        Row(
            (2, 2),
            {**LONG, "pruning": {**PRUNING[name], "distribution": "global"}},
            SHARDED,
            SAME_LAYOUT,
        )
        for name in ("snip", "gradual", "iterative", "early-bird")
    ),
]


GATHERED = {"samo": {"weights": "sparse", "zero_stage": 3}}
SPARSE_WEIGHTS = {"samo": {"weights": "sparse"}}
SPARSE_AT_REST = [
    *stored(
        crossed(
            [(1, 1), (2, 1), (1, 2), (2, 2)],
            [{"pruning": {"include": "all"}}, {"pruning": {}}, {"pruning": {"at_step": 2}}],
            [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp16"}],
            settings=steps(4),
        ),
        SPARSE_WEIGHTS,
    ),
    # Two microbatches in flight, and both ways to come back to a layer.
    *stored(
        crossed(
            [(2, 1), (1, 1), (3, 1)],
            [
                {"pipeline": {"split_backward": True}},
                {"pipeline": {"checkpoint_activations": 1}},
                {"pipeline": {"checkpoint_activations": 2, "schedule": "gpipe"}},
                {"optimizer": {"name": "lamb"}, "train": {"eval_every": 2, "eval_steps": 1}},
            ],
            [{"precision": "fp32"}, {"precision": "bf16"}],
            settings=steps(3, pruning={"include": "all"}),
        ),
        SPARSE_WEIGHTS,
    ),
    *(
        row
        for layouts, free in (
            ([(2, 2), (1, 3)], {"samo": {"weights": "sparse", "zero_stage": 1}}),
            ([(1, 2), (2, 2), (1, 3)], GATHERED),
        )
        for row in stored(
            crossed(
                layouts,
                [{"precision": "fp32"}, {"precision": "bf16"}, {"samo": {"gradient": "exact"}}],
                axis("pruning", "at_step", 0, 2),
                subject=WIDE,
            ),
            free,
        )
    ),
    # Both ways to return to a layer, orders that arrivals or a schedule decide, an optimizer that
    # reads state twice, and replicas of which one takes a microbatch more.
    *stored(
        crossed(
            [(2, 2), (1, 2), (3, 2)],
            [
                {"pipeline": {"split_backward": True}, "optimizer": {"name": "lamb"}},
                {"pipeline": {"checkpoint_activations": 1}, "samo": {"gradient": "fp32"}},
                {"pipeline": {"schedule": "1f1b"}, "train": {"eval_every": 2, "eval_steps": 1}},
            ],
            [{"precision": "bf16"}, {"precision": "fp16"}],
            settings={**steps(3, pruning={"include": "all"}), **batch(9, 2)},
        ),
        GATHERED,
    ),
    *(
        Row(
            layout,
            {**LONG, "pruning": {**PRUNING[name], "include": "all"}, "precision": "bf16"},
            free,
            SAME_LAYOUT,
        )
        for layout, free in (((2, 2), GATHERED), ((2, 1), SPARSE_WEIGHTS))
        for name in PRUNING
    ),
]


ROWS = [
    replace(row, subject=COARSE) if row.subject is GPT and row.layout[1] < 3 else row
    for row in (*METHODS, *OPTIMIZERS, *STORAGE, *SPARSE_AT_REST)
]


@pytest.fixture(autouse=True)
def _spoilt_once_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight that is sparse at rest can be read while its layer is not expanded."""
    release = Expansion.release

    def spoil(expansion: Expansion) -> None:
        expansion._memory.fill_(torch.nan)
        release(expansion)

    monkeypatch.setattr(Expansion, "release", spoil)


@pytest.mark.parametrize("row", parameters(ROWS, every=24))
def test_a_run_is_what_its_judge_says(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"


@pytest.mark.parametrize(("sparsity", "encoding"), [(0.9, "MaskIndex"), (0.98, "Int32Index")])
def test_auto_takes_the_encoding_of_fewer_bytes(sparsity: float, encoding: str) -> None:
    config = tiny_config(pruning={"sparsity": sparsity}, train={"steps": 1})
    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())

    kinds = {
        type(tensor.index).__name__ for layer in trainer.layers for tensor in layer.state.owned
    }
    assert kinds == {"FullIndex", encoding}
