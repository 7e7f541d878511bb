"""WideResNet-101-2 is the published one, and torchvision's names map to ours and back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.images import (
    assert_same_in_1_to_4_stages,
    image_config,
    image_data,
    shapes_of,
    small_wide_resnet,
)
from torch import Tensor

from axsparse.config.model_config import WideResnetConfig
from axsparse.models.layer import Model, count_top1
from axsparse.models.survey import survey
from axsparse.models.zoo.wide_resnet import (
    init_head,
    name_of_torchvision,
    torchvision_name,
    wide_resnet101_2,
)
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers

GROUPS = [
    # (blocks, input channels of the first, bottleneck channels, output channels)
    (3, 64, 128, 256),
    (4, 256, 256, 512),
    (23, 512, 512, 1024),
    (3, 1024, 1024, 2048),
]


def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    vectors = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{key}": (channels,) for key in vectors} | {f"{name}.num_batches_tracked": ()}


def published() -> dict[str, tuple[int, ...]]:
    """A state dict under torchvision's names."""
    table: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
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


def test_names_and_shapes_are_torchvisions_and_parameters_are_counted_to_the_last() -> None:
    model = wide_resnet101_2(WideResnetConfig(), 224)
    found = survey(model)

    shapes = {torchvision_name(name): shape for name, shape in shapes_of(model).items()}
    assert shapes == published()
    assert found.num_params == 126_886_696
    assert len(found.layers) == 1 + 33 + 1


def test_names_go_to_torchvision_and_back() -> None:
    names = list(shapes_of(wide_resnet101_2(WideResnetConfig(), 224)))

    assert [name_of_torchvision(torchvision_name(name)) for name in names] == names
    assert [torchvision_name(name_of_torchvision(name)) for name in published()] == list(
        published()
    )
    assert name_of_torchvision("bn1.running_mean") == "stem.bn1.running_mean"
    assert name_of_torchvision("layer1.0.bn1.weight") == "layer1.0.bn1.weight"


def test_flops_are_those_of_22_8_billion_multiply_adds_at_224_pixels() -> None:
    found = survey(wide_resnet101_2(WideResnetConfig(), 224))

    assert found.flops == pytest.approx(2 * 22.75e9, rel=2e-3)


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


def test_it_computes_what_its_state_dict_computes_by_torchvisions_names() -> None:
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


def test_it_trains_bitwise_alike_on_one_to_four_stages() -> None:
    config = image_config(train={"steps": 3, "eval_steps": 1})
    model = small_wide_resnet()

    [(trainer, trace)] = assert_same_in_1_to_4_stages(
        model, config, image_data(33), validation=image_data(33, samples=7)
    )

    assert len(set(trace.losses)) == 3
    assert trainer.last_evaluation is not None
    assert model.metrics == {"top1": count_top1}
