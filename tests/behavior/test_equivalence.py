"""The table of equivalences: what each run must be equal to, in every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import (
    INDICES,
    INFINITE,
    ONE_STAGE,
    PREFERENCES,
    PRUNING,
    SAME_LAYOUT,
    SCHEDULES,
    WIDE,
    WIDE_INFINITE,
    Row,
    Settings,
    crossed,
    freed,
    judge,
    parameters,
    trained,
)
from support.exhaustive import by_default
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

PIPELINES = [(1, 1), (2, 1), (3, 1), (4, 1)]
REPLICAS = [(1, 2), (1, 3), (1, 4), (2, 2)]
FEW = [(1, 1), (2, 1), (2, 2)]
REPLICAS_TOLERANCE = 2e-6
"""Other orders of fp32 sums: 1.4e-7 was the most seen over eight steps, one unit of an fp32."""
BF16_TOLERANCE = (0.002, math.inf)
"""bf16 has 8 bits of mantissa: a weight is off by up to 0.4 %, a mean over many by much less
(3e-4 seen)."""
FP16_TOLERANCE = (3e-4, 3e-3)
"""fp16 has three more bits than bf16 (1e-5 seen)."""
LAMB_TOLERANCE = (1e-4, 1e-4)
"""fp32 steps against fp64 ones: 1e-7 each, which early steps, where the update is about the
sign of the gradient, amplify."""


def steps(number: int, **sections: Any) -> Settings:
    return {"train": {"steps": number}, **sections}


def batch(size: int, microbatch: int) -> Settings:
    return {"batch": {"global_batch_size": size, "microbatch_size": microbatch}}


def axis(section: str, key: str, *values: Any) -> list[Settings]:
    return [{section: {key: value}} for value in values]


# -- layouts, schedules and arrival orders -----------------------------------------------------

TIED = axis("model", "tie_embeddings", False, True)
LAYOUTS = [
    *crossed(PIPELINES + REPLICAS, TIED),
    *crossed([(4, 1)], [batch(6, 6 // number) for number in (1, 2, 3)], settings=steps(2)),
    *(
        Row((4, 1), steps(3), {"pipeline": {"slack": order % 3}}, order=order, is_usual=order < 3)
        for order in range(6)
    ),
    *(Row((3, 1), steps(2), {"pipeline": {"prefer": one}}, order=1) for one in PREFERENCES),
    Row((2, 2), steps(4, samo={"enabled": False})),
]

RANDOM = steps(2, model={"dropout": 0.2})
EVALUATING = {"train": {"steps": 3, "eval_every": 1, "eval_steps": 9}}
DEEP = steps(2, model={"num_layers": 4})
BY_SCHEDULE = [
    # With recomputation, and with four layers on three stages an uneven split.
    *(
        replace(row, free={"pipeline": {"slack": row.layout[0] - 1, **row.free["pipeline"]}})
        for row in freed(
            [(2, 1), (3, 1), (4, 1), (2, 2), (1, 1)],
            [
                {"pipeline": {"schedule": schedule, "checkpoint_activations": 1}}
                for schedule in SCHEDULES
            ],
            settings=RANDOM,
            judge=ONE_STAGE,
            order=3,
        )
    ),
    *(
        Row((4, 1), settings, {"layout": {"split": split}, **free}, ONE_STAGE, order=5)
        for settings, split in ((DEEP, [3, 1, 1, 1]), (steps(2, **batch(6, 3)), [1, 1, 1, 1]))
        for free in axis("pipeline", "schedule", *SCHEDULES)
    ),
    *(
        Row((3, 1), EVALUATING, free, ONE_STAGE)
        for free in axis("pipeline", "schedule", *SCHEDULES)
    ),
]
KEPT = axis("pipeline", "checkpoint_activations", 1, 2)
STAGES = [
    *freed([(1, 1), (2, 1)], KEPT, settings=steps(3, model={"dropout": 0.2}), judge=ONE_STAGE),
    *(Row((g, 1), steps(4, model={"dropout": 0.3}), judge=ONE_STAGE) for g in (2, 3, 4)),
    *(
        Row((g, 1), steps(4, precision=precision), judge=ONE_STAGE)
        for precision in ("bf16", "fp16")
        for g in (2, 3, 4)
    ),
    # 23 samples in batches of 12, microbatches of 3: the last of each is smaller.
    *(
        Row(layout, {**batch(12, 3), **settings, "model": {"dropout": 0.2}}, free, ONE_STAGE)
        for layout in ((2, 1), (4, 1), (2, 2))
        for settings, free in ((EVALUATING, {}), (steps(3), EVALUATING))
    ),
    # So high a scale overflows some gradients until it has been halved a few times.
    *(
        Row(
            layout,
            {"precision": "fp16", "loss_scale": {"initial": 2.0**21, "growth_interval": 4}},
            judge=ONE_STAGE,
        )
        for layout in ((2, 1), (2, 2))
    ),
]

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
    *crossed([(1, 1), (2, 1), (3, 1), (2, 2)], list(BY_NAME.values()), settings=LONG),
    # A tensor of 102,400 entries has two blocks in the norm; the 20,480 that are kept have one.
    *(
        Row(
            layout,
            {**LONG, **BY_NAME["magnitude later"], "model": {"hidden_size": 160}},
            is_usual=layout == (2, 2),
        )
        for layout in ((2, 1), (2, 2))
    ),
    *(
        row
        for distribution in ("erk", "global")
        for row in crossed(
            [(3, 1), (2, 2)],
            [
                {"pruning": {**PRUNING[name], "distribution": distribution, "include": "all"}}
                for name in ("magnitude", "snip", "gradual", "early-bird")
            ],
            settings=LONG,
        )
    ),
    Row(
        (2, 1),
        {"pruning": {"method": "wanda", "calibration_samples": 5}, **steps(2)},
        {},
        ONE_STAGE,
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
        [*PIPELINES, *REPLICAS], STORED, settings={"precision": "bf16"}, tolerance=BF16_TOLERANCE
    ),
    *crossed(
        FEW,
        STORED,
        settings={"precision": "fp16", "loss_scale": {"growth_interval": 2}},
        tolerance=FP16_TOLERANCE,
    ),
]

SHARDED = {"samo": {"shard_optimizer": True}}
SPLIT = {"samo": {"split_master": True}}
MANY: Settings = {
    "model": {"num_layers": 1, "hidden_size": 16},
    "precision": "bf16",
    **batch(2, 2),
}
WIDE_STATE: list[Settings] = [
    {"precision": "bf16"},
    {"precision": "bf16", "samo": {"split_master": True, "gradient": "fp32"}},
    {"precision": "bf16", "samo": {"index": "mask", "gradient": "half"}},
    {"precision": "fp16", "loss_scale": {"initial": 1024.0}},
    {"optimizer": {"name": "lamb", "learning_rate": 1e-3}},
    {"optimizer": {"name": "sgd", "nesterov": True}},
    {"samo": {"enabled": False}},
]


def stored(rows: list[Row], free: Settings) -> list[Row]:
    """The same rows, judged by the same layout without some free settings."""
    return [replace(row, free=free, judge=SAME_LAYOUT) for row in rows]


STORAGE = [
    *(
        one
        for index in INDICES
        for one in stored(
            crossed(
                [(1, 1), (2, 2)],
                [{"pruning": {}}, {"pruning": {"include": "all"}}, {"pruning": {"at_step": 2}}],
                [{"precision": "fp32"}, {"precision": "bf16"}],
                settings=steps(4),
            ),
            {"samo": {"index": index}},
        )
    ),
    *stored(crossed(FEW, LATER, settings={"precision": "bf16"}), SPLIT),
    *(Row((1, 1), {**MANY, **steps(n)}, SPLIT, SAME_LAYOUT, is_usual=n == 50) for n in (50, 500)),
    *stored(
        crossed(
            [(1, 2), (1, 3), (1, 4), (2, 2), (3, 2)],
            axis("pruning", "at_step", 0, 2),
            subject=WIDE,
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
            is_usual=name in ("gradual", "early-bird"),
        )
        for name in ("snip", "gradual", "iterative", "early-bird")
    ),
]


@pytest.mark.parametrize(
    "row", parameters([*LAYOUTS, *BY_SCHEDULE, *STAGES, *METHODS, *OPTIMIZERS, *STORAGE])
)
def test_a_run_is_what_its_judge_says(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"


@pytest.mark.parametrize(
    "row",
    parameters(
        [
            *(Row(layout, steps(7, **batch(12, 3)), subject=INFINITE) for layout in [*FEW, (4, 1)]),
            Row((1, 2), steps(4), SHARDED, SAME_LAYOUT, WIDE_INFINITE),
        ]
    ),
)
def test_a_step_with_an_overflow_is_skipped_by_all_ranks_alike(row: Row) -> None:
    finite = judge(row)[0][1].finite

    assert 0 < finite.count(False) < len(finite)


def test_a_scale_that_overflows_is_lowered_until_steps_update_and_then_grows() -> None:
    high = {"precision": "fp16", "loss_scale": {"initial": 2.0**21, "growth_interval": 4}}
    [(trainer, trace)] = trained(Row((1, 1), high))
    usual = {"precision": "fp16", "loss_scale": {"growth_interval": 2}}
    [(other, fine)] = trained(Row((1, 1), usual))

    assert not trace.finite[0]
    assert trace.finite[-1]
    assert trainer.parts.loss_scale.scale < 2.0**21
    assert fine.finite == [True] * 8
    assert other.parts.loss_scale.scale == 65536.0 * 2**4


def test_precision_and_dropout_show_in_the_losses() -> None:
    """Else rows that compare them would compare nothing."""
    losses = [
        trained(Row((1, 1), settings))[0][1].losses[0]
        for settings in (steps(1), steps(1, precision="bf16"), steps(1, model={"dropout": 0.3}))
    ]

    assert len(set(losses)) == 3


def test_dense_training_keeps_no_index_and_every_encoding_its_own_bytes() -> None:
    used = {
        name: judge(Row((1, 1), steps(1, samo=samo)))[0][0].state_bytes().index
        for name, samo in {
            "dense": {"enabled": False},
            "auto": {},
            **{index: {"index": index} for index in INDICES},
        }.items()
    }

    assert used["dense"] == 0
    assert used["mask"] < used["int32"]
    assert used["auto"] <= used["mask"]


def test_a_split_master_takes_half_the_bytes_of_one_in_fp32_and_rounds_nothing() -> None:
    [(usual, _)], [(split, _)] = (
        trained(Row((1, 1), {"precision": "bf16", **free})) for free in ({}, SPLIT)
    )

    assert 2 * split.state_bytes().master == usual.state_bytes().master
    for layer in split.parts.layers:
        for tensor in layer.state.owned:
            masters = layer.state.master(tensor.name)
            assert not torch.equal(masters, masters.bfloat16().float())


@pytest.mark.parametrize("g_data", by_default([3], [2, 3, 4]))
def test_replicas_agree_with_one_replica_to_the_rounding_of_their_sums(g_data: int) -> None:
    settings = {"train": {"eval_every": 8, "eval_steps": 9}}
    [(alone, one)] = trained(Row((1, 1), settings))

    [(trainer, many), *_] = trained(Row((1, g_data), settings))

    assert many.losses == pytest.approx(one.losses, rel=REPLICAS_TOLERANCE)
    assert many.norms == pytest.approx(one.norms, rel=REPLICAS_TOLERANCE)
    assert trainer.last_evaluation is not None
    assert alone.last_evaluation is not None
    evaluated = alone.last_evaluation.loss
    assert trainer.last_evaluation.loss == pytest.approx(evaluated, rel=REPLICAS_TOLERANCE)


def test_training_leaves_torchs_random_numbers_alone() -> None:
    config = tiny_config(model={"dropout": 0.3}, train={"steps": 1})
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)

    train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert torch.equal(torch.rand(3), expected)
