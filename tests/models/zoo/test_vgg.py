"""VGG-19 is the published one, under torchvision's names."""

from __future__ import annotations

import math

import pytest
import torch
from support.images import (
    CLASSES,
    assert_same_in_1_to_4_stages,
    image_config,
    image_data,
    small_vgg,
)
from torch import nn

from axsparse.config.model_config import Vgg19Config
from axsparse.models.layer import count_top1
from axsparse.models.survey import survey
from axsparse.models.zoo.vgg import init_parameter, vgg19
from axsparse.runtime.seeds import keyed_generator

CONVOLUTIONS = [
    # (number in torchvision's `features`, input channels, output channels)
    (0, 3, 64),
    (2, 64, 64),
    (5, 64, 128),
    (7, 128, 128),
    (10, 128, 256),
    (12, 256, 256),
    (14, 256, 256),
    (16, 256, 256),
    (19, 256, 512),
    (21, 512, 512),
    (23, 512, 512),
    (25, 512, 512),
    (28, 512, 512),
    (30, 512, 512),
    (32, 512, 512),
    (34, 512, 512),
]
LINEARS = [(0, 512 * 7 * 7, 4096), (3, 4096, 4096), (6, 4096, 1000)]


def published() -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {}
    for number, inputs, outputs in CONVOLUTIONS:
        table[f"features.{number}.weight"] = (outputs, inputs, 3, 3)
        table[f"features.{number}.bias"] = (outputs,)
    for number, inputs, outputs in LINEARS:
        table[f"classifier.{number}.weight"] = (outputs, inputs)
        table[f"classifier.{number}.bias"] = (outputs,)
    return table


def test_names_and_shapes_are_torchvisions_and_parameters_are_counted_to_the_last() -> None:
    found = survey(vgg19(Vgg19Config(), 224))

    assert {p.name: p.shape for layer in found.layers for p in layer.parameters} == published()
    assert found.num_params == 143_667_240
    assert [layer.kind for layer in found.layers] == ["embedding", *["block"] * 17, "head"]


def test_flops_are_those_of_19_6_billion_multiply_adds_at_224_pixels() -> None:
    found = survey(vgg19(Vgg19Config(), 224))

    assert found.flops == pytest.approx(2 * 19.63e9, rel=1e-3)


def reference(dropout: float = 0.0) -> nn.Module:
    """The small VGG of these tests, built of modules as torchvision does it."""
    features: list[nn.Module] = []
    for inputs, outputs in [(3, 4), (4, 8), (8, 16)]:
        features += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        features += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        features += [nn.MaxPool2d(2, 2)]
    classifier = nn.Sequential(
        *(nn.Linear(16 * 49, 16), nn.ReLU(True), nn.Dropout(dropout)),
        *(nn.Linear(16, 16), nn.ReLU(True), nn.Dropout(dropout)),
        nn.Linear(16, CLASSES),
    )
    whole = nn.Sequential()
    whole.add_module("features", nn.Sequential(*features))
    whole.add_module("avgpool", nn.AdaptiveAvgPool2d((7, 7)))
    whole.add_module("flatten", nn.Flatten())
    whole.add_module("classifier", classifier)
    return whole


def test_it_computes_what_torchvisions_network_of_the_same_weights_computes() -> None:
    torch.manual_seed(3)
    theirs = reference()
    state = theirs.state_dict()
    x = torch.randn(5, 3, 16, 16)

    ours = x
    for layer in small_vgg().layers:
        module = layer.build()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(state.pop(f"{layer.name}.{name}"))
        ours = module(ours)

    assert not state
    assert torch.equal(ours, theirs(x))


@pytest.mark.parametrize(
    ("shape", "std"),
    [((64, 32, 3, 3), math.sqrt(2 / (64 * 9))), ((300, 200), 0.01)],
)
def test_weights_start_as_in_torchvision(shape: tuple[int, ...], std: float) -> None:
    values = init_parameter("weight", shape, keyed_generator(1))

    assert values.mean().item() == pytest.approx(0, abs=std / 30)
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert init_parameter("bias", (3,), keyed_generator(1)).tolist() == [0.0] * 3


def test_dropout_follows_both_hidden_layers_and_no_other() -> None:
    layers = [layer.build() for layer in vgg19(Vgg19Config(dropout=0.5), 32).layers[:1]]
    small = [layer.build() for layer in small_vgg(dropout=0.5).layers]

    drops = [[m.p for m in module.modules() if isinstance(m, nn.Dropout)] for module in small]
    assert drops == [[]] * 6 + [[0.5], [0.5], []]
    assert not any(isinstance(m, nn.Dropout) for m in layers[0].modules())


def test_it_trains_bitwise_alike_on_one_to_four_stages() -> None:
    model = small_vgg(dropout=0.5)

    [(_, trace)] = assert_same_in_1_to_4_stages(model, image_config(), image_data(16))

    assert len(set(trace.losses)) == 3
    assert model.metrics == {"top1": count_top1}
