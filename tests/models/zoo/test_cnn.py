"""The small convolutional network for the digits."""

from __future__ import annotations

import torch
from support.images import assert_same_in_1_to_4_stages, image_config, image_data
from torch import nn

from axsparse.config.model_config import CnnConfig
from axsparse.models.layer import count_top1
from axsparse.models.survey import survey
from axsparse.models.zoo.cnn import cnn

DIGITS = CnnConfig(num_classes=10, channels=1)


def test_it_has_the_parameters_that_its_docstring_says() -> None:
    found = survey(cnn(DIGITS, 8))

    convolutions = 9 * (1 * 32 + 32 * 64 + 64 * 128 + 128 * 128)
    norms = 2 * (32 + 64 + 128 + 128)
    assert found.num_params == convolutions + norms + 128 * 10 + 10 == 241_898
    assert [layer.kind for layer in found.layers] == [
        "embedding",
        "block",
        "block",
        "block",
        "head",
    ]


def test_flops_count_the_convolutions_at_the_size_of_their_images() -> None:
    flops = [layer.flops for layer in survey(cnn(DIGITS, 8)).layers]

    assert flops == [
        2 * 9 * 1 * 32 * 64,
        2 * 9 * 32 * 64 * 64,
        2 * 9 * 64 * 128 * 16,
        2 * 9 * 128 * 128 * 16,
        2 * 128 * 10,
    ]


def test_images_become_logits() -> None:
    shapes = []
    x = torch.randn(3, 1, 8, 8)
    for layer in cnn(DIGITS, 8).layers:
        module = layer.build()
        for parameter in module.parameters():
            nn.init.uniform_(parameter)
        x = module(x)
        shapes.append(tuple(x.shape))

    assert shapes == [(3, 32, 8, 8), (3, 64, 4, 4), (3, 128, 4, 4), (3, 128, 2, 2), (3, 10)]


def test_it_trains_bitwise_alike_on_one_to_four_stages() -> None:
    model = cnn(DIGITS, 8)
    config = image_config(train={"steps": 3, "eval_steps": 1})
    data = image_data(8, channels=1)

    [(trainer, _)] = assert_same_in_1_to_4_stages(model, config, data, validation=data)

    assert trainer.last_evaluation is not None
    assert model.metrics == {"top1": count_top1}
