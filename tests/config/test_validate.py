"""Rules between fields: the layouts and batches that fit, and the messages where they do not."""

from __future__ import annotations

import pytest

from axsparse.config.load import configure
from axsparse.config.validate import (
    check_batch,
    check_config,
    check_data,
    remarks,
)
from axsparse.runtime.grid import Grid

# --- check_config ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.sequence_length=128",),
        ("schedule.warmup_steps=100",),
        ("schedule.warmup_steps=100", "train.steps=5"),
        ("schedule.warmup_steps=300", "schedule.decay_steps=300"),
        ("pruning.at_step=99",),
        ("pruning.at_step=100", "pruning.sparsity=0"),
        ("pruning.at_step=100", "samo.enabled=false"),
        ("layout.split=[4, 4]", "layout.g_inter=2"),
        ("layout.split=[4, 4]",),
        ("optimizer.betas=[0.95, 0.9]",),
        (
            "optimizer.name=sgd",
            "optimizer.nesterov=true",
        ),
        ("pipeline.split_backward=auto", "pipeline.compile=true"),
        ("data.intra_document_attention=true", "model.name=hf", "model.hf={model_type: llama}"),
        ("pruning.method=gradual", "pruning.at_step=0", "pruning.rewind_step=never"),
    ],
)
def test_consistent_settings_pass(overrides: tuple[str, ...]) -> None:
    check_config(configure(None, overrides))


def test_a_model_is_written_without_the_fields_of_others() -> None:
    config = configure(None, ["model.name=hf", "model.hf={model_type: llama}"])

    assert config.model_dump()["model"] == {
        "name": "hf",
        "weights": None,
        "from": None,
        "new": (),
        "sequence_length": config.model.sequence_length,
        "vocab_size": config.model.vocab_size,
        "hf": {"model_type": "llama"},
    }


# --- check_batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "size"), [(Grid(1, 1), 48), (Grid(2, 7), 5), (Grid(1, 48), 1), (Grid(1, 1), 100)]
)
def test_a_batch_of_a_microbatch_for_each_replica_passes(grid: Grid, size: int) -> None:
    check_batch(configure(None, [f"batch.microbatch_size={size}"]), grid)


# --- check_data --------------------------------------------------------------------------


def test_data_that_just_fits_passes() -> None:
    check_data(configure(None), source="stdlib", words=256, vocab_size=256, num_samples=48)
    check_data(configure(None), source="stdlib", words=None, vocab_size=999, num_samples=48)


# --- remarks -----------------------------------------------------------------------------


def test_what_may_not_be_meant_is_remarked() -> None:
    settings = ["schedule.warmup_steps=50", "train.steps=20", "batch.global_batch_size=48"]

    assert [*remarks(configure(None, settings), 68)] == [
        "note: the warm-up of 50 steps is longer than the run, so that the learning rate does not "
        "reach its peak (schedule.warmup_steps)",
        "note: 20 steps of 48 samples go 14.1 times over the data, which has 68 (train.steps, "
        "batch.global_batch_size)",
    ]
    usual = configure(None, ["train.steps=2000", "schedule.warmup_steps=20"])
    assert [*remarks(usual, 480)] == []
