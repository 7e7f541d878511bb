"""Rules between fields: the layouts and batches that fit, and the messages where they do not."""

from __future__ import annotations

import pytest

from axsparse.config.load import configure
from axsparse.config.validate import check_config, remarks, replaced


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
        ("optimizer.name=sgd", "optimizer.nesterov=true"),
        ("pipeline.split_backward=auto", "pipeline.compile=true"),
        ("data.intra_document_attention=true", "model.name=hf", "model.hf={model_type: llama}"),
        ("pruning.method=gradual", "pruning.at_step=0", "pruning.rewind_step=never"),
    ],
)
def test_consistent_settings_pass(overrides: tuple[str, ...]) -> None:
    check_config(configure(None, overrides))


def test_what_may_not_be_meant_is_remarked() -> None:
    settings = ["schedule.warmup_steps=50", "train.steps=20", "batch.global_batch_size=48"]
    settings += ["checkpoint.every=0", "checkpoint.keep_every=3"]

    assert [*remarks(configure(None, settings), 68)] == [
        "note: with checkpoint.every 0, checkpoint.keep_every keeps checkpoints of signals, "
        "checkpoint.keep_best and Trainer.save alone",
        "note: the warm-up of 50 steps is longer than the run, so that the learning rate does not "
        "reach its peak (schedule.warmup_steps)",
        "note: 20 steps of 48 samples go 14.1 times over the data, which has 68 (train.steps, "
        "batch.global_batch_size)",
    ]
    usual = configure(None, ["train.steps=2000", "schedule.warmup_steps=20"])
    assert [*remarks(usual, 480)] == []


OWN = [f"the {name} of the program" for name in ("model", "data", "learning rate", "optimizer")]


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (OWN[:1], ["model.num_layers=3", "model.sequence_length=9"], ["model.num_layers"]),
        (OWN[:2], ["data.source=tokens", "data.path=x"], ["data.source", "data.path"]),
        (OWN[1:], ["schedule.warmup_steps=3"], ["schedule.warmup_steps"]),
        (OWN[1:], ["schedule.warmup_steps=3", "pruning.method=early-bird"], []),
        (OWN, ["optimizer.name=sgd", "optimizer.eps=1e-3"], ["optimizer.name"]),
        ([], ["pruning.mask=x", "pruning.exclude=[a]"], ["pruning.exclude"]),
        ([], ["pruning.pattern=2:4", "pruning.sparsity=0.7"], ["pruning.sparsity"]),
        ([], ["pruning.pattern=2:4", "pruning.sparsity=0.5"], []),
        ([], ["model.num_layers=3", "data.source=tokens", "data.path=x"], []),
        (OWN, ["model.name=gpt", "data.source=stdlib"], []),
    ],
)
def test_settings_in_whose_place_something_else_is_given_are_remarked(
    given: list[str], settings: list[str], said: list[str]
) -> None:
    found = [*replaced(configure(None, settings), given)]

    listed = " (--set), ".join(said) + " (--set)"
    assert [line.split(": ")[2] for line in found] == ([listed] if said else [])
