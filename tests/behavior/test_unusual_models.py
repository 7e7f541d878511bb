"""Models that the generator of `tests/fuzz/` found to break, each as small as it can be."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from support.resuming import ran, same
from support.runs import (
    assert_bitwise,
    random_init,
    summed_loss,
    tiny_config,
    train_in_process,
    vector_data,
)
from torch import nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model

ROWS, WIDTH, CLASSES = 9, 6, 5


def token_classes(samples: int = 24, length: int = 4) -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(ROWS, (samples, length), generator=generator)
    return ArrayDataset(tokens, torch.randint(CLASSES, (samples,), generator=generator))


def embedding_model(*, sparse: bool) -> Model:
    table = partial(nn.EmbeddingBag, ROWS, WIDTH, mode="sum", sparse=sparse)
    head = partial(nn.Linear, WIDTH, CLASSES)
    return Model(
        [
            Layer("table", table, kind="embedding", init=random_init),
            Layer("head", head, kind="head", init=random_init),
        ],
        summed_loss,
    )


def test_an_embedding_whose_gradients_are_sparse_trains_as_one_with_dense_gradients() -> None:
    config = tiny_config(
        pruning={"sparsity": 0.5, "include": "all", "method": "random"},
        batch={"global_batch_size": 8, "microbatch_size": 2},
        train={"steps": 4},
    )
    data = token_classes()
    [(_, dense)] = train_in_process(1, 1, embedding_model(sparse=False), config, data)

    for _, sparse in train_in_process(2, 1, embedding_model(sparse=True), config, data):
        assert_bitwise(sparse, dense)


def test_weights_to_rewind_to_are_saved_where_the_first_stage_trains_nothing(
    tmp_path: Path,
) -> None:
    config = tiny_config(
        pruning={"sparsity": 0.5, "include": "all", "at_step": 2, "rewind_step": 1},
        batch={"global_batch_size": 6, "microbatch_size": 3},
        train={"steps": 3},
    )

    def frozen() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    head = partial(nn.Linear, WIDTH, CLASSES)
    model = Model([Layer("frozen", frozen), Layer("head", head)], summed_loss)
    run = partial(ran, (2, 1), config, model=lambda _: model, data=vector_data(width=WIDTH))
    whole = run(tmp_path / "whole")

    run(tmp_path / "parts", stop_after=1)

    same(run(tmp_path / "parts", resume="auto"), whole)
