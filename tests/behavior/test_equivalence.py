"""The table of equivalences: what each run must be equal to, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cases import (
    INFINITE,
    ONE_STAGE,
    SAME_LAYOUT,
    SCHEDULES,
    WIDE_INFINITE,
    Row,
    Settings,
    axis,
    batch,
    crossed,
    freed,
    judge,
    merged,
    parameters,
    steps,
)
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.data_parallel.gradient_sync import GradientSync
from axsparse.pipeline.weight_gradients import DeferredGradients
from axsparse.samo.layer_state import LayerState
from axsparse.training.trainer import Trainer

PIPELINES = [(1, 1), (2, 1), (3, 1), (4, 1)]
REPLICAS = [(1, 2), (1, 3), (1, 4), (2, 2)]
FEW = [(1, 1), (2, 1), (2, 2)]

# -- layouts, schedules and arrival orders -----------------------------------------------------

SHARDED = {"samo": {"zero_stage": 1}}
TIED = axis("model", "tie_embeddings", False, True)
LAYOUTS = [
    *crossed(PIPELINES + REPLICAS, TIED, settings=steps(4)),
    *crossed([(4, 1)], [batch(6, 6 // number) for number in (1, 2, 3)], settings=steps(2)),
    *(
        Row((4, 1), steps(3), {"pipeline": {"extra_in_flight": order % 3}}, order=order)
        for order in range(6)
    ),
    Row((2, 2), steps(4, samo={"enabled": False})),
    Row((2, 1), steps(2, **batch(6, 8))),  # One microbatch, which the batch does not fill.
]

RANDOM = steps(2, model={"dropout": 0.2})
EVALUATING = {"train": {"steps": 3, "eval_every": 1, "eval_steps": 9}}
DEEP = steps(2, model={"num_layers": 4})
BY_SCHEDULE = [
    # With recomputation, and with four layers on three stages an uneven split.
    *(
        replace(
            row, free={"pipeline": {"extra_in_flight": row.layout[0] - 1, **row.free["pipeline"]}}
        )
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
        Row((4, 1), steps(2, **batch(6, size)), free, ONE_STAGE)
        for free in axis("pipeline", "schedule", *SCHEDULES)
        for size in (1, 6)
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


@pytest.mark.parametrize("row", parameters([*LAYOUTS, *BY_SCHEDULE, *STAGES], every=11))
def test_a_run_is_what_its_judge_says(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"


@pytest.mark.parametrize(
    "row",
    parameters(
        [
            *(Row(layout, steps(7, **batch(12, 3)), subject=INFINITE) for layout in [*FEW, (4, 1)]),
            Row((1, 2), steps(4), SHARDED, SAME_LAYOUT, WIDE_INFINITE),
            Row(
                (2, 2),
                steps(4, precision="fp16", samo={"weights": "sparse"}),
                {"samo": {"zero_stage": 3}},
                SAME_LAYOUT,
                WIDE_INFINITE,
            ),
            *(
                Row(layout, steps(7, samo={"gradient": "exact"}, **batch(12, 2)), subject=INFINITE)
                for layout in [(1, 5), (2, 3)]
            ),
        ]
    ),
)
def test_a_step_with_an_overflow_is_skipped_by_all_ranks_alike(row: Row) -> None:
    finite = judge(row)[0][1].finite

    assert 0 < finite.count(False) < len(finite)


# -- split backwards ---------------------------------------------------------------------------


def split_modules(trainer: Trainer) -> int:
    """How many modules of a rank's stage have their weight gradients deferred."""
    products = trainer.engine.stage._products
    return 0 if products is None or products.deferred is None else len(products)


SPLIT = {"pipeline": {"split_backward": True}}
BY_TORCH = [
    Row(
        layout,
        steps(2, model={"tie_embeddings": tied}),
        merged(SPLIT, {"pipeline": {"schedule": schedule, "extra_in_flight": 2}}),
        order=5,
    )
    for layout, schedule, tied in (
        ((1, 1), "message-driven", False),
        ((2, 1), "1f1b", True),
        ((4, 1), "gpipe", False),
        ((2, 2), "message-driven", True),
        ((1, 2), "1f1b", False),
    )
]
SPLIT_SETTINGS: list[Settings] = [
    {"precision": "bf16"},
    {"precision": "fp16", "loss_scale": {"initial": 2.0**22}, "train": {"steps": 4}},
    {"precision": "bf16", "samo": {"gradient": "half"}},
    {"pipeline": {"checkpoint_activations": 2}, "model": {"dropout": 0.2}},
    {"samo": {"enabled": False}, "precision": "bf16"},
    {"pruning": {"method": "gradual", "at_step": 1, "interval": 1, "until_step": 2}},
    {"pruning": {"method": "snip", "at_step": 1}},
    {"pipeline": {"extra_in_flight": 0}},
    {"batch": {"microbatch_size": 12}},
]
AS_WHOLE = [
    Row(layout, merged(steps(3), batch(12, 2), settings), SPLIT, SAME_LAYOUT, order=7)
    for layout, settings in [
        *(((2, 1), each) for each in SPLIT_SETTINGS),
        ((2, 2), {"samo": {"zero_stage": 1}, "precision": "bf16"}),
    ]
]


@pytest.mark.parametrize("row", parameters([*BY_TORCH, *AS_WHOLE], every=8))
def test_split_backwards_are_bitwise_whole_ones(row: Row) -> None:
    ranks = judge(row)

    assert sum(split_modules(trainer) for trainer, _ in ranks[: row.layout[0]]) == 8
    assert all(ranks[0][1].finite) == ("loss_scale" not in row.settings)


def test_weight_gradients_wait_and_a_layers_all_reduce_starts_with_its_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[int] = []
    ended: list[DeferredGradients] = []
    ready: list[tuple[str, str]] = []
    run, start = DeferredGradients.run, GradientSync.ready

    def counting(deferred: DeferredGradients, microbatch: int) -> None:
        waiting.append(len(deferred))
        ended.append(deferred)
        run(deferred, microbatch)

    def noting(sync: GradientSync, layer: LayerState) -> None:
        ready.append((layer.name, sync.phases.action))
        start(sync, layer)

    monkeypatch.setattr(DeferredGradients, "run", counting)
    monkeypatch.setattr(GradientSync, "ready", noting)
    config = tiny_config(train={"steps": 2}, pipeline={"split_backward": True})

    train_in_process(2, 2, tiny_gpt(config), config, token_data(), order=2)

    assert max(waiting) > 1
    assert len(waiting) == 2 * 2 * 12
    assert all(len(deferred) == 0 for deferred in ended)
    last = {"embed": "B5", "block0": "W5", "block1": "W5", "head": "B5"}
    assert sorted(ready) == sorted(4 * list(last.items()))
