"""Split backwards train the same model as full ones, bit by bit, and the same as the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import (
    SAME_LAYOUT,
    Row,
    Settings,
    batch,
    judge,
    merged,
    parameters,
    steps,
)
from support.runs import (
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)

from axsparse.config.schema import Config
from axsparse.data_parallel.gradient_sync import GradientSync
from axsparse.pipeline.weight_gradients import DeferredGradients
from axsparse.samo.layer_state import LayerState
from axsparse.training.trainer import Trainer


def splitting(is_split: bool, **sections: Any) -> Config:
    return tiny_config(**merged(sections, {"pipeline": {"split_backward": is_split}}))


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
SETTINGS: list[Settings] = [
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
        *(((2, 1), each) for each in SETTINGS),
        ((2, 2), {"samo": {"zero_stage": 1}, "precision": "bf16"}),
    ]
]


@pytest.mark.parametrize("row", parameters([*BY_TORCH, *AS_WHOLE], every=3))
def test_split_backwards_are_bitwise_whole_ones(row: Row) -> None:
    ranks = judge(row)

    assert sum(split_modules(trainer) for trainer, _ in ranks[: row.layout[0]]) == 8
    assert all(ranks[0][1].finite) == ("loss_scale" not in row.settings)


def test_auto_splits_where_there_are_several_stages() -> None:
    data = token_data()
    for layout, sections, expected in (
        ((2, 1), {}, True),
        ((1, 1), {}, False),
        ((1, 2), {}, False),
        ((2, 1), {"pipeline": {"checkpoint_activations": 1}}, False),
        ((2, 1), {"pipeline": {"schedule": "1f1b"}}, False),
    ):
        config = tiny_config(**{"train": {"steps": 1}, **sections})
        for trainer, _ in train_in_process(*layout, tiny_gpt(config), config, data):
            assert (trainer.engine.stage._products is not None) is expected


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
    config = splitting(True, train={"steps": 2})

    train_in_process(2, 2, tiny_gpt(config), config, token_data(), order=2)

    assert max(waiting) > 1
    assert len(waiting) == 2 * 2 * 12
    assert all(len(deferred) == 0 for deferred in ended)
    last = {"embed": "B5", "block0": "W5", "block1": "W5", "head": "B5"}
    assert sorted(ready) == sorted(4 * list(last.items()))
