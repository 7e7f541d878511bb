"""Models that the generator of `tests/fuzz/` found to break, each as small as it can be."""

from __future__ import annotations

from functools import partial

import torch
from support.runs import (
    assert_bitwise,
    random_init,
    summed_loss,
    tiny_config,
    train_in_process,
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
        pruning={"sparsity": 0.5, "include": "all", "method": "rigl", "interval": 1},
        batch={"global_batch_size": 8, "microbatch_size": 2},
        train={"steps": 4},
    )
    data = token_classes()
    [(_, dense)] = train_in_process(1, 1, embedding_model(sparse=False), config, data)

    for _, sparse in train_in_process(2, 1, embedding_model(sparse=True), config, data):
        assert_bitwise(sparse, dense)
