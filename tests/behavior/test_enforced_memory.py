"""What a plan says fits does not run out, where the system enforces what the plan says."""

from __future__ import annotations

import sys

import pytest
from support.exhaustive import by_default
from support.mpirun import TESTS, Finished, run_mpirun

GPT = (
    *("model.num_layers=4", "model.hidden_size=768", "model.sequence_length=512"),
    *("model.vocab_size=4096", "batch.global_batch_size=4", "batch.microbatch_size=2"),
)
VGG = (
    *("model.name=vgg19", "data.source=images", "data.path=none", "precision=bf16"),
    *("pruning.sparsity=0.9", "batch.global_batch_size=2", "layout.g_inter=2"),
)
MODELS = {
    "pruned GPT in bf16": (*GPT, "pruning.sparsity=0.9", "precision=bf16"),
    "dense GPT in fp32, recomputed": (
        *(*GPT, "model.sequence_length=128", "samo.enabled=false", "precision=fp32"),
        *("pipeline.checkpoint_activations=1", "layout.g_inter=2"),
    ),
    "pruned GPT in fp32, much of which waits for its weight gradients": (
        *("model.num_layers=4", "model.hidden_size=512", "model.sequence_length=256"),
        *("model.vocab_size=4096", "batch.global_batch_size=12", "batch.microbatch_size=2"),
        *("precision=fp32", "pruning.sparsity=0.9", "layout.g_inter=2"),
        *("pipeline.split_backward=true", "pipeline.held=5"),
    ),
    "pruned VGG-19, whose largest tensor takes more to make than to train": VGG,
}
# Threads, MPI and small blocks take some 10 MB that no plan counts: not seen beside these.
ROOM = dict(zip(MODELS, (0.30, 0.42, 0.29, 1.0), strict=True))
"""GB a rank: as much as the predicted peak, and a few percent."""


def trained(model: str, part: float) -> Finished:
    """With `part` of the predicted peak."""
    settings = (*MODELS[model], f"layout.memory_per_rank={ROOM[model]}")
    command = [str(TESTS / "mpi" / "limited.py"), str(part), *settings]
    return run_mpirun(2, command, python=sys.executable)


@pytest.mark.parametrize("model", by_default([], MODELS))
def test_a_twentieth_beyond_the_predicted_peak_is_enough(model: str) -> None:
    job = trained(model, 1.05)

    assert job.returncode == 0, str(job)
    assert "predicted peak" in job.stdout


@pytest.mark.exhaustive
def test_the_limit_is_one() -> None:
    model = next(iter(MODELS))

    job = trained(model, 0.6)

    assert job.returncode == 70, str(job)
    assert "can't allocate memory" in job.stderr, str(job)
