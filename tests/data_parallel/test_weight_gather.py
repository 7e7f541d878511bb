"""Optimizer state sharded over replicas: fewer bytes (that training is the same, the table says).

The layers here have several blocks of kept entries, so that shares split tensors, and
biases, so that there are blocks smaller than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.exhaustive import each_once
from support.oracle import Trace
from support.pruned import kept
from support.runs import (
    mlp,
    tiny_config,
    train_in_process,
    vector_data,
)

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.models.layer import Model
from axsparse.models.survey import survey
from axsparse.samo.precision import DTYPES
from axsparse.samo.shards import BLOCK
from axsparse.samo.stage_bytes import stage_bytes
from axsparse.samo.state_bytes import StateFormat
from axsparse.training.trainer import Trainer

WIDTH = 510
Ranks = list[tuple[Trainer, Trace]]


def wide_config(*, shard: bool, samo: dict[str, Any] | None = None, **sections: Any) -> Config:
    return tiny_config(
        **{
            "batch": {"global_batch_size": 12, "microbatch_size": 1},
            "pruning": {"sparsity": 0.4},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 0.5},
            "train": {"steps": 3},
            **sections,
            "samo": {**(samo or {}), "shard_optimizer": shard},
        }
    )


def wide_run(g_inter: int, g_data: int, config: Config) -> Ranks:
    return train_in_process(g_inter, g_data, mlp(3, WIDTH), config, vector_data(24, WIDTH))


def shares(ranks: Ranks) -> list[list[range]]:
    """Per layer of the first stage, what each replica holds."""
    trainers = [trainer for trainer, _ in ranks if trainer.parts.place.stage == 0]
    return [
        [trainer.parts.layers[number].state.shares.held for trainer in trainers]
        for number in range(len(trainers[0].parts.layers))
    ]


def test_shares_of_these_layers_split_a_tensor() -> None:
    ranks = wide_run(1, 2, wide_config(shard=True))

    first, second = shares(ranks)[0]
    weight = ranks[0][0].parts.layers[0].state.owned[0]

    assert weight.kept > 2 * BLOCK
    assert 0 < first.stop == second.start < weight.kept


def test_all_replicas_end_with_the_same_weights() -> None:
    ranks = wide_run(1, 3, wide_config(shard=True, precision="bf16"))

    for _, trace in ranks[1:]:
        for name, weight in trace.weights.items():
            assert torch.equal(weight, ranks[0][1].weights[name])


@pytest.mark.parametrize(("g_data", "gradient"), each_once([2, 3], ["half", "fp32"]))
def test_as_many_bytes_travel_as_in_an_all_reduce(g_data: int, gradient: str) -> None:
    sent = []
    for shard in (False, True):
        config = wide_config(shard=shard, precision="bf16", samo={"gradient": gradient})
        ranks = wide_run(1, g_data, config)
        sent.append(sum(trainer.parts.sync.gradient_bytes_sent for trainer, _ in ranks))

    assert sent[0] == sent[1] > 0


def predicted(trainer: Trainer, model: Model, replicas: int, replica: int | None) -> int:
    config = trainer.config
    surveyed = survey(model)
    names = {layer.spec.name for layer in trainer.parts.layers}
    return stage_bytes(
        [layer for layer in surveyed.layers if layer.name in names],
        surveyed.ties,
        kept(model, config.pruning),
        StateFormat(
            half=DTYPES[config.precision] != torch.float32,
            gradient_bytes=trainer.parts.layers[0].state.gradient.dtype.itemsize,
            moments=len(trainer.parts.run.optimizer.moments),
            index="mask",
            split_master=config.samo.split_master,
            replicas=replicas,
        ),
        replica,
    ).total


@pytest.mark.parametrize(
    ("at_step", "samo"), each_once([0, 2], [{}, {"split_master": True}]), ids=str
)
def test_every_rank_holds_what_the_formula_says(at_step: int, samo: dict[str, Any]) -> None:
    pruning = {"sparsity": 0.4, "at_step": at_step}
    config = wide_config(shard=True, precision="bf16", samo=samo, pruning=pruning)
    ranks = wide_run(2, 3, config)

    totals = [trainer.state_bytes().total for trainer, _ in ranks]

    model = mlp(3, WIDTH)
    places = [trainer.parts.place for trainer, _ in ranks]
    assert totals == [
        predicted(trainer, model, 3, place.replica)
        for (trainer, _), place in zip(ranks, places, strict=True)
    ]
    assert len(set(totals)) > 2  # shares differ, so the formula has to know which is whose
    for (trainer, _), place in zip(ranks, places, strict=True):
        of_stage = [
            total for total, at in zip(totals, places, strict=True) if at.stage == place.stage
        ]
        assert predicted(trainer, model, 3, None) == max(of_stage)


def test_eight_replicas_hold_an_eighth_of_masters_and_moments_together_all() -> None:
    config = wide_config(
        shard=True,
        precision="bf16",
        batch={"global_batch_size": 8},
        train={"steps": 1},
    )
    parts = [trainer.state_bytes() for trainer, _ in wide_run(1, 8, config)]
    (whole,) = wide_run(1, 1, config)

    assert sum(part.master for part in parts) == whole[0].state_bytes().master
    assert sum(part.optimizer for part in parts) == whole[0].state_bytes().optimizer


@pytest.mark.parametrize("shard", [False, True])
def test_what_a_replica_does_not_hold_cannot_be_read(shard: bool) -> None:
    def read(trainer: Trainer) -> None:
        state = trainer.parts.layers[0].state
        weight = state.owned[0]
        state.optimizer_state.read_master(weight, 0, weight.kept)

    config = wide_config(shard=shard, precision="bf16", train={"steps": 1})
    data: Dataset = vector_data(24, WIDTH)
    if shard:
        with pytest.raises(AssertionError, match="another replica holds these"):
            train_in_process(1, 2, mlp(3, WIDTH), config, data, before=read)
    else:
        train_in_process(1, 2, mlp(3, WIDTH), config, data, before=read)


def test_master_and_moments_of_all_shares_are_gathered_whole() -> None:
    seen: list[Sequence[int]] = []

    def look(trainer: Trainer) -> None:
        state = trainer.parts.layers[0].state
        weight = state.owned[0]
        master = state.master(weight.name)
        seen.append((master.numel(), int((master == 0).sum()), weight.kept))

    config = wide_config(shard=True, precision="bf16", train={"steps": 1})
    train_in_process(1, 3, mlp(3, WIDTH), config, vector_data(24, WIDTH), before=look)

    assert all(numel == kept and not zeros for numel, zeros, kept in seen)
