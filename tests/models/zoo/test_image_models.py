"""VGG-19 and WideResNet-101-2 are the published ones, under torchvision's names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from support.images import (
    CLASSES,
    assert_same_in_1_to_4_stages,
    image_config,
    image_data,
    small_vgg,
    small_wide_resnet,
)
from torch import Tensor, nn

from axsparse.config.model_config import CnnConfig, Vgg19Config, WideResnetConfig
from axsparse.models.layer import Model, count_top1
from axsparse.models.survey import survey
from axsparse.models.zoo.image_models import (
    cnn,
    init_head,
    init_vgg,
    torchvision_name,
    vgg19,
    wide_resnet101_2,
)
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers

CNN = cnn(CnnConfig(num_classes=10, channels=1), 8)
VGG19 = vgg19(Vgg19Config(), 224)
WIDE_RESNET = wide_resnet101_2(WideResnetConfig(), 224)
Table = dict[str, tuple[int, ...]]

# -- what is published ----------------------------------------------------------------------

CHANNELS = [3, *[64] * 2, *[128] * 2, *[256] * 4, *[512] * 8]
NUMBERS = [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34]
"""The convolutions in torchvision's `features`."""
LINEARS = [(0, 512 * 7 * 7, 4096), (3, 4096, 4096), (6, 4096, 1000)]


def published_vgg() -> Table:
    table: Table = {}
    for number, inputs, outputs in zip(NUMBERS, CHANNELS, CHANNELS[1:], strict=False):
        table[f"features.{number}.weight"] = (outputs, inputs, 3, 3)
        table[f"features.{number}.bias"] = (outputs,)
    for number, inputs, outputs in LINEARS:
        table[f"classifier.{number}.weight"] = (outputs, inputs)
        table[f"classifier.{number}.bias"] = (outputs,)
    return table


GROUPS = [
    # (blocks, input channels of the first, bottleneck channels, output channels)
    (3, 64, 128, 256),
    (4, 256, 256, 512),
    (23, 512, 512, 1024),
    (3, 1024, 1024, 2048),
]


def norm(name: str, channels: int) -> Table:
    vectors = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{key}": (channels,) for key in vectors} | {f"{name}.num_batches_tracked": ()}


def published_wide_resnet() -> Table:
    """A state dict under torchvision's names."""
    table: Table = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    for group, (blocks, entering, inner, leaving) in enumerate(GROUPS, start=1):
        for block in range(blocks):
            at = f"layer{group}.{block}"
            inputs = leaving if block else entering
            table[f"{at}.conv1.weight"] = (inner, inputs, 1, 1)
            table[f"{at}.conv2.weight"] = (inner, inner, 3, 3)
            table[f"{at}.conv3.weight"] = (leaving, inner, 1, 1)
            table |= (
                norm(f"{at}.bn1", inner) | norm(f"{at}.bn2", inner) | norm(f"{at}.bn3", leaving)
            )
            if block == 0:
                table[f"{at}.downsample.0.weight"] = (leaving, inputs, 1, 1)
                table |= norm(f"{at}.downsample.1", leaving)
    return table | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


@pytest.mark.parametrize(
    ("model", "published", "parameters", "kinds", "flops"),
    [
        (VGG19, published_vgg(), 143_667_240, ["embedding", *["block"] * 17, "head"], 2 * 19.63e9),
        (
            WIDE_RESNET,
            published_wide_resnet(),
            126_886_696,
            ["embedding", *["block"] * 33, "head"],
            2 * 22.75e9,
        ),
    ],
    ids=["vgg19", "wide_resnet101_2"],
)
def test_names_shapes_and_flops_are_those_published_and_parameters_are_counted_to_the_last(
    model: Model, published: Table, parameters: int, kinds: Sequence[str], flops: float
) -> None:
    surveyed = survey(model)

    shapes = {
        torchvision_name(tensor.name): tensor.shape
        for layer in surveyed.layers
        for tensor in layer.parameters
    } | {
        torchvision_name(tensor.name): tensor.shape
        for layer in surveyed.layers
        for tensor in layer.buffers
    }
    assert shapes == published
    assert surveyed.num_params == parameters
    assert [layer.kind for layer in surveyed.layers] == kinds
    assert surveyed.flops == pytest.approx(flops, rel=2e-3)


def test_the_small_network_has_the_parameters_and_flops_that_are_worked_out_by_hand() -> None:
    surveyed = survey(CNN)

    convolutions = 9 * (1 * 32 + 32 * 64 + 64 * 128 + 128 * 128)
    norms = 2 * (32 + 64 + 128 + 128)
    assert surveyed.num_params == convolutions + norms + 128 * 10 + 10 == 241_898
    assert [layer.kind for layer in surveyed.layers] == ["embedding", *["block"] * 3, "head"]
    assert [layer.flops for layer in surveyed.layers] == [
        2 * 9 * 1 * 32 * 64,
        2 * 9 * 32 * 64 * 64,
        2 * 9 * 64 * 128 * 16,
        2 * 9 * 128 * 128 * 16,
        2 * 128 * 10,
    ]


# -- what is computed -----------------------------------------------------------------------


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


def test_vgg_computes_what_torchvisions_network_of_the_same_weights_computes() -> None:
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


def test_dropout_follows_both_hidden_layers_and_no_other() -> None:
    small = [layer.build() for layer in small_vgg(dropout=0.5).layers]

    drops = [[m.p for m in module.modules() if isinstance(m, nn.Dropout)] for module in small]
    assert drops == [[]] * 6 + [[0.5], [0.5], []]


def built(model: Model) -> list[BuiltLayer]:
    options = StateOptions(torch.float32, torch.float32, (), seed=2, masks=None)
    return build_layers(model.layers, {}, options)


def by_torchvisions_names(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The small network of these tests in evaluation mode, computed from its state dict."""

    def convolved(name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    def normalised(name: str, x: Tensor) -> Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, variance, state[f"{name}.weight"], state[f"{name}.bias"])

    x = F.relu(normalised("bn1", convolved("conv1", x, stride=2, padding=3)))
    x = F.max_pool2d(x, 3, 2, 1)
    for group, blocks in enumerate((1, 2, 1, 1), start=1):
        for block in range(blocks):
            at = f"layer{group}.{block}"
            stride = 2 if group > 1 and block == 0 else 1
            hidden = F.relu(normalised(f"{at}.bn1", convolved(f"{at}.conv1", x)))
            hidden = convolved(f"{at}.conv2", hidden, stride=stride, padding=1)
            hidden = F.relu(normalised(f"{at}.bn2", hidden))
            hidden = normalised(f"{at}.bn3", convolved(f"{at}.conv3", hidden))
            if block == 0:
                shortcut = convolved(f"{at}.downsample.0", x, stride=stride)
                x = normalised(f"{at}.downsample.1", shortcut)
            x = F.relu(hidden + x)
    return F.linear(x.mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


def test_a_wide_resnet_computes_what_its_state_dict_computes_by_torchvisions_names() -> None:
    layers = built(small_wide_resnet())
    x = torch.randn(5, 3, 33, 33, generator=torch.Generator().manual_seed(1))
    for layer in layers:  # once in training, so that statistics are not what they start at
        x = layer.module.train()(x)
    x = torch.randn(5, 3, 33, 33, generator=torch.Generator().manual_seed(1))
    state = {
        torchvision_name(f"{layer.spec.name}.{name}"): tensor.detach()
        for layer in layers
        for name, tensor in layer.module.state_dict().items()
    }

    ours = x
    for layer in layers:
        ours = layer.module.eval()(ours)

    assert torch.equal(ours, by_torchvisions_names(state, x))


# -- start values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "std"),
    [((64, 32, 3, 3), math.sqrt(2 / (64 * 9))), ((300, 200), 0.01)],
)
def test_a_vgg_starts_as_in_torchvision(shape: tuple[int, ...], std: float) -> None:
    values = init_vgg("weight", shape, keyed_generator(1))

    assert values.mean().item() == pytest.approx(0, abs=std / 30)
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert init_vgg("bias", (3,), keyed_generator(1)).tolist() == [0.0] * 3


def test_convolutions_norms_and_head_start_as_in_torchvision() -> None:
    tensors = {
        f"{layer.spec.name}.{name}": tensor
        for layer in built(small_wide_resnet())
        for name, tensor in layer.module.state_dict().items()
    }
    wide = tensors["layer4.0.conv2.weight"]

    assert wide.std().item() == pytest.approx(math.sqrt(2 / (wide.shape[0] * 9)), rel=0.02)
    assert tensors["layer1.0.bn3.weight"].tolist() == [1.0] * 16
    assert tensors["layer1.0.bn3.bias"].tolist() == [0.0] * 16
    assert tensors["layer1.0.bn3.running_var"].tolist() == [1.0] * 16
    head = init_head(400, "weight", (200, 400), keyed_generator(1))
    assert head.abs().max().item() == pytest.approx(1 / 20, rel=1e-3)
    assert head.std().item() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize(
    ("model", "size", "channels"),
    [(CNN, 8, 1), (small_vgg(dropout=0.5), 16, 3), (small_wide_resnet(), 33, 3)],
    ids=["cnn", "vgg", "wide_resnet"],
)
def test_each_trains_bitwise_alike_on_one_to_four_stages(
    model: Model, size: int, channels: int
) -> None:
    config = image_config(train={"steps": 3, "eval_steps": 1})
    data, validation = image_data(size, channels), image_data(size, channels, samples=7)

    [(trainer, trace)] = assert_same_in_1_to_4_stages(model, config, data, validation=validation)

    assert len(set(trace.losses)) == 3
    assert trainer.last_evaluation is not None
    assert model.metrics == {"top1": count_top1}
