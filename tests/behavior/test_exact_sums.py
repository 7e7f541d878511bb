"""Exact sums of gradients: the same bits with any number of stages and of replicas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import (
    ONE_RANK,
    PRUNING,
    Layout,
    PlannedModel,
    Row,
    batch,
    crossed,
    judge,
    merged,
    parameters,
    reference,
    steps,
)
from support.exhaustive import by_default
from support.resuming import ran
from support.runs import (
    Doing,
    assert_bitwise,
    loaded,
    mlp,
    summed_loss,
    tiny_config,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError
from axsparse.samo.fixed_point import Units

EXACT: dict[str, Any] = {"samo": {"gradient": "exact"}}
SHARDED: dict[str, Any] = {"samo": {"zero_stage": 1}}
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (3, 1), (4, 1)]
"""Twelve microbatches: five replicas take two or three of them."""
FEW = [(1, 5), (2, 3), (3, 1)]


def exact(*settings: Any) -> dict[str, Any]:
    return merged(EXACT, *settings)


LOADED = PlannedModel("loaded mlp", lambda config: loaded(mlp()), vector_data)
UNEVEN = batch(10, 2)
"""Five microbatches."""


ROWS = [
    *crossed(SHAPES, [exact(steps(3, model={"tie_embeddings": tied})) for tied in (True, False)]),
    *crossed(
        FEW,
        [
            exact(UNEVEN, steps(4, optimizer={"name": "sgd"})),
            exact(batch(11, 2), steps(4)),
            exact(UNEVEN, steps(8, pruning=PRUNING["gradual"])),
            exact(UNEVEN, steps(4, pruning=PRUNING["snip"])),
            exact(UNEVEN, steps(4, pruning=PRUNING["snip later"])),
            exact(UNEVEN, steps(7, pruning=PRUNING["iterative"])),
            exact(UNEVEN, steps(4, samo={"enabled": False})),
        ],
    ),
    *(Row(layout, exact(UNEVEN, steps(4)), SHARDED) for layout in FEW[:2]),
    *crossed(
        FEW,
        [
            exact(UNEVEN, steps(4), section)
            for section in (
                {"optimizer": {"name": "lamb", "eps": 1e-6}},
                {"pruning": {"method": "wanda", "calibration_samples": 5}},
                {"train": {"eval_every": 2, "eval_steps": 2}},
                {"precision": "bf16"},
                {"model": {"dropout": 0.2}, "precision": "bf16"},
                {"pipeline": {"split_backward": True, "checkpoint_activations": 1}},
                # So high a scale overflows some gradients until it has been halved a few times.
                {
                    **{"precision": "fp16", "train": {"steps": 8}},
                    "loss_scale": {"initial": 2.0**21, "growth_interval": 4},
                },
            )
        ],
        judge=ONE_RANK,
    ),
    *crossed(
        FEW,
        [
            exact(UNEVEN, steps(4, pruning={"method": "sparsegpt", "calibration_samples": 7})),
            exact(UNEVEN, steps(4, pruning={"method": "wanda", "calibration_samples": 7})),
        ],
        judge=ONE_RANK,
        subject=LOADED,
    ),
]


@pytest.mark.parametrize("row", parameters(ROWS, every=30))
def test_any_number_of_replicas_gives_the_bits_of_one_process(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"
    if row.config().train.eval_steps:
        assert [trace.evaluation for _, trace in ranks] == [
            one.evaluation for one in reference(row)
        ] * len(ranks)


CHAIN: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 5), {"samo": {"zero_stage": 1}}),
    ((3, 1), {"pipeline": {"split_backward": True}}),
    ((2, 2), {"pipeline": {"checkpoint_activations": 1}}),
]
"""Shapes of one run, each for one step."""


@pytest.mark.parametrize("precision", by_default(["bf16"], ["fp32", "bf16"]))
def test_a_run_whose_shape_changes_at_every_step_ends_in_the_same_files(
    precision: str, tmp_path: Path
) -> None:
    def config(*free: Any) -> Config:
        masks = {"method": "gradual", "at_step": 1, "interval": 1, "until_step": 2}
        settings = exact(steps(len(CHAIN), precision=precision, pruning=masks), *free)
        return tiny_config(**settings, checkpoint={"every": len(CHAIN)})

    alone = ran((1, 1), config(), tmp_path / "alone")
    losses: dict[int, float] = {}
    before: str | None = None
    for step, (layout, free) in enumerate(CHAIN, 1):
        run_dir = tmp_path / f"run{step}"
        stop = step if step < len(CHAIN) else None
        losses |= ran(layout, config(free), run_dir, resume=before, stop_after=stop).losses
        before = str(run_dir / "checkpoints" / f"step-{step}")

    def files(run: str) -> dict[str, bytes]:
        folder = tmp_path / run / "checkpoints" / f"step-{len(CHAIN)}"
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    assert losses == alone.losses and len(files("alone")) > 2
    assert files("alone") == files(f"run{len(CHAIN)}")


def counting(m: Any, x: Tensor) -> Any:
    """Counts its calls in buffers, one of which is large, and its result depends on both."""
    m.calls.data.add_(1)
    m.many.add_(1)
    return m.linear(x * (1 + m.calls + m.many[0]))


def test_a_step_that_is_computed_again_counts_once_in_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [
        Layer("norm", lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))),
        Layer("count", lambda: Doing(counting, calls=torch.zeros(1), many=torch.zeros(2**15))),
        Layer("out", partial(nn.Linear, 16, 5)),
    ]
    model = Model(layers, loss=summed_loss)
    config = tiny_config(**exact(steps(2), batch(12, 2)))
    answers = iter([False, True, False, True])
    monkeypatch.setattr(Units, "follow", lambda units, fits: next(answers))
    [(_, twice)] = train_in_process(1, 1, model, config, vector_data())
    assert next(answers, None) is None, "both steps were computed twice"
    monkeypatch.setattr(Units, "follow", lambda units, fits: True)
    [(_, once)] = train_in_process(1, 1, model, config, vector_data())

    assert once.buffers["norm.1.num_batches_tracked"] == once.buffers["count.calls"] == 12
    assert_bitwise(twice, once)


def test_a_step_cannot_be_computed_again_once_a_large_buffer_has_begun_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def beginning(m: Any, x: Tensor) -> Any:
        m.calls.add_(1)
        if m.calls > 6:
            m.many.add_(1)
        return m.linear(x)

    parts: dict[str, Any] = {"calls": torch.zeros(1), "many": torch.zeros(2**15)}
    model = Model([Layer("out", lambda: Doing(beginning, 5, **parts))], loss=summed_loss)
    config = tiny_config(**exact(steps(2), batch(12, 2)))
    answers = iter([True, False])
    monkeypatch.setattr(Units, "follow", lambda units, fits: next(answers))

    with pytest.raises(ConfigError, match=r"^buffer 'many' of Doing: .* samo.gradient: auto$"):
        train_in_process(1, 1, model, config, vector_data())
