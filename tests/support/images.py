"""Small convolutional models and random images for them, and files of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.oracle import Trace
from support.runs import assert_bitwise, tiny_config, train_in_process
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Dataset
from axsparse.models.layer import Kind, Layer, Model, count_top1
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.model_profile import profile
from axsparse.training.trainer import Trainer

CLASSES = 7
SAFETENSORS_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
Ranks = Sequence[tuple[Trainer, Trace]]


def image_config(**sections: Any) -> Config:
    defaults = {
        "batch": {"global_batch_size": 12, "microbatch_size": 4},
        "train": {"steps": 3},
    }
    return tiny_config(**{**defaults, **sections})


def image_data(size: int, channels: int = 3, samples: int = 24) -> ArrayDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, channels, size, size, generator=generator)
    return ArrayDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init`: weights N(0, 2 / fan-out), norms 1, biases 0."""
    if len(shape) == 1:
        return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)
    fan_out = shape[0] * math.prod(shape[2:])
    return torch.empty(shape).normal_(0.0, math.sqrt(2 / fan_out), generator=generator)


class Convolution(nn.Module):
    """3×3 convolution, batch normalisation, ReLU, and 2×2 max pooling if `halves`."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 2) if self.halves else x


class Plain(nn.Conv2d):
    """3×3 convolution with a bias, ReLU, and 2×2 max pooling if `halves`."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(super().forward(x))
        return F.max_pool2d(x, 2) if self.halves else x


class Hidden(nn.Linear):
    """Linear layer, ReLU and dropout of flattened images."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(F.relu(super().forward(x.flatten(1))))
        return dropped


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions next to a 1×1 shortcut, each with batch normalisation."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        return F.relu(self.bn3(self.conv3(hidden)) + self.downsample(x))


class Head(nn.Linear):
    """Mean over the pixels, and a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(dim=(2, 3)))


def classifier(
    name: str, builds: Mapping[str, Callable[[], nn.Module]], channels: int, size: int
) -> Model:
    """A model of images, whose first layer is the embedding and whose last one is the head."""
    last = len(builds) - 1
    kinds: list[Kind] = ["head" if at == last else "block" for at in range(len(builds))]
    kinds[0] = "embedding"
    return Model(
        [
            Layer(layer, build, kind=kind, init=init)
            for kind, (layer, build) in zip(kinds, builds.items(), strict=True)
        ],
        summed_cross_entropy,
        name=name,
        metrics={"top1": count_top1},
        example=lambda samples: (torch.zeros(samples, channels, size, size, device="meta"),),
    )


def small_cnn(channels: int, size: int, num_classes: int = CLASSES) -> Model:
    """Four convolutions with batch normalisation, and a head."""
    widths = (channels, 32, 64, 128, 128)
    builds: dict[str, Callable[[], nn.Module]] = {
        f"block{at}": partial(Convolution, widths[at], widths[at + 1], halves=at % 2 == 1)
        for at in range(4)
    }
    return classifier("cnn", builds | {"head": partial(Head, 128, num_classes)}, channels, size)


def small_vgg(dropout: float = 0.0, num_classes: int = CLASSES) -> Model:
    """Convolutions and linear layers with biases, under torchvision's names of a VGG."""
    widths, numbers = (3, 4, 4, 8, 8, 16, 16), (0, 2, 5, 7, 10, 12)
    builds: dict[str, Callable[[], nn.Module]] = {
        f"features.{number}": partial(Plain, widths[at], widths[at + 1], halves=at % 2 == 1)
        for at, number in enumerate(numbers)
    }
    builds["classifier.0"] = partial(Hidden, 16 * 2 * 2, 16, dropout)
    builds["classifier.3"] = partial(Hidden, 16, 16, dropout)
    builds["classifier.6"] = partial(nn.Linear, 16, num_classes)
    return classifier("vgg", builds, 3, 16)


def small_wide_resnet() -> Model:
    """A stem, four bottlenecks and a head, under torchvision's names but for the stem's prefix."""
    builds: dict[str, Callable[[], nn.Module]] = {"stem": Stem}
    for group in range(4):
        inputs, outputs = 16 * 2 ** (group - 1) if group else 4, 16 * 2**group
        stride = 2 if group else 1
        builds[f"layer{group + 1}.0"] = partial(Bottleneck, inputs, outputs // 2, outputs, stride)
    return classifier("wide_resnet", builds | {"fc": partial(Head, 128, CLASSES)}, 3, 33)


class Stem(nn.Module):
    """7×7 convolution, batch normalisation and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)


def torchvision_name(name: str) -> str:
    """The name of a tensor of `small_wide_resnet` in torchvision."""
    return name.removeprefix("stem.")


def buffers_of(ranks: Ranks) -> dict[str, Tensor]:
    """All buffers by global name; of the last of several replicas."""
    return {
        f"{layer.spec.name}.{name}": buffer
        for trainer, _ in ranks
        for layer in trainer.layers
        for name, buffer in layer.module.named_buffers()
    }


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Parameters and buffers by global name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in profile(model).layers:
        shapes |= {parameter.name: parameter.shape for parameter in layer.parameters}
        shapes |= {buffer.name: buffer.shape for buffer in layer.buffers}
    return shapes


def assert_equal_tensors(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, others[name]), name


def assert_same_in_1_to_4_stages(
    model: Model, config: Config, data: Dataset, validation: Dataset | None = None
) -> Ranks:
    """Losses, weights, moments, buffers and evaluations; returns the run on one stage."""
    one = train_in_process(1, 1, model, config, data, validation=validation)
    for g_inter in (2, 4):
        ranks = train_in_process(
            g_inter, 1, model, config, data, order=g_inter, validation=validation
        )
        for trainer, trace in ranks:
            assert_bitwise(trace, one[0][1])
            assert trainer.last_evaluation == one[0][0].last_evaluation
        assert_equal_tensors(buffers_of(ranks), buffers_of(one))
    return one


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """The format by its description: length of the header, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        contents = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(contents)],
        }
        data += contents
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
