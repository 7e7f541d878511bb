"""Rules between fields: which layouts and batches fit, and what is told where they do not."""

from __future__ import annotations

import pytest

from axsparse.config.load import load_config
from axsparse.config.validate import (
    check_batch,
    check_config,
    check_data,
    check_gpu_settings,
    check_rounds,
    remarks,
)
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.grid import Grid


def test_the_end_of_a_search_says_where_it_comes_from() -> None:
    search = ("pruning.method=early-bird", "pruning.interval=4", "train.steps=24")
    asked = load_config(None, search)
    settled = load_config(None, (*search, "pruning.until_step=12")).config

    with pytest.raises(
        ConfigError, match=r"end at 20, after pruning.until_step 12 \(auto, by train.steps 24\); "
    ):
        check_rounds(asked, settled)


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
        ("optimizer.nesterov=true",),
        ("pipeline.split_backward=auto", "pipeline.compile=true"),
        ("data.separate_documents=true", "model.name=hf", "model.hf={model_type: llama}"),
        ("pruning.method=gradual", "pruning.at_step=0", "pruning.rewind_step=never"),
    ],
)
def test_consistent_settings_pass(overrides: tuple[str, ...]) -> None:
    check_config(load_config(None, overrides))


def test_a_model_is_written_without_the_fields_of_others() -> None:
    config = load_config(None, ["model.name=hf", "model.hf={model_type: llama}"]).config

    assert config.model_dump()["model"] == {
        "name": "hf",
        "weights": None,
        "from": None,
        "new": (),
        "sequence_length": config.model.sequence_length,
        "vocab_size": config.model.vocab_size,
        "hf": {"model_type": "llama"},
    }


LOOKS = "true looks into a GPU, and the ranks train without one; choose false"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.memory_history", LOOKS),
        ("samo.offload", "true takes state off a GPU, and there is none; choose false"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(key: str, said: str) -> None:
    loaded = load_config(None, [f"{key}=true"])
    check_gpu_settings(loaded, has_gpu=True)
    check_gpu_settings(load_config(None), has_gpu=False)

    with pytest.raises(ConfigError) as caught:
        check_gpu_settings(loaded, has_gpu=False)

    assert str(caught.value) == f"{key} (--set): {said}"


# --- check_batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "size"), [(Grid(1, 1), 48), (Grid(2, 7), 5), (Grid(1, 48), 1), (Grid(1, 1), 100)]
)
def test_a_batch_of_a_microbatch_for_each_replica_passes(grid: Grid, size: int) -> None:
    check_batch(load_config(None, [f"batch.microbatch_size={size}"]), grid)


def test_too_few_microbatches_are_told_with_what_would_be_enough() -> None:
    loaded = load_config(None, ["batch.global_batch_size=50", "batch.microbatch_size=20"])

    with pytest.raises(ConfigError) as caught:
        check_batch(loaded, Grid(2, 4))

    assert str(caught.value) == (
        "batch.global_batch_size (--set): 50 in microbatches of 20 makes 3 for 4 replicas; choose "
        "at least 61, smaller microbatches (batch.microbatch_size), or at most 3 as layout.g_data"
    )
    check_batch(
        load_config(None, ["batch.global_batch_size=61", "batch.microbatch_size=20"]), Grid(2, 4)
    )


# --- check_data --------------------------------------------------------------------------


def test_data_that_just_fits_passes() -> None:
    check_data(load_config(None), source="stdlib", words=256, vocab_size=256, num_samples=48)
    check_data(load_config(None), source="stdlib", words=None, vocab_size=999, num_samples=48)


def test_the_model_has_a_row_for_every_token_of_the_data() -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(load_config(None), source="stdlib", words=256, vocab_size=257, num_samples=48)

    assert str(caught.value) == (
        "model.vocab_size (default): 256 is below the vocabulary of stdlib, 257; "
        "choose at least 257"
    )


def test_the_data_fills_a_step() -> None:
    with pytest.raises(DataError) as caught:
        check_data(load_config(None), source="stdlib", words=256, vocab_size=256, num_samples=47)

    assert str(caught.value) == (
        "stdlib: 47 samples cannot fill a step of batch.global_batch_size (default) 48; "
        "take more data, a smaller batch or a smaller data.sequence_length"
    )


# --- remarks -----------------------------------------------------------------------------


def test_what_may_not_be_meant_is_remarked() -> None:
    settings = ["schedule.warmup_steps=50", "train.steps=20", "batch.global_batch_size=48"]

    assert [*remarks(load_config(None, settings).config, 68)] == [
        "note: the warm-up of 50 steps is longer than the run, so that the learning rate does not "
        "reach its peak (schedule.warmup_steps)",
        "note: 20 steps of 48 samples go 14.1 times over the data, which has 68 (train.steps, "
        "batch.global_batch_size)",
    ]
    usual = load_config(None, ["train.steps=2000", "schedule.warmup_steps=20"]).config
    assert [*remarks(usual, 480)] == []
