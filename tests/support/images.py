"""Small convolutional models and random images for them, and files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.cases import Ranks
from support.runs import tiny_config
from torch import Tensor
from vgg19 import vgg
from wideresnet101 import wide_resnet

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile

CLASSES = 7


def image_config(**sections: Any) -> Config:
    defaults = {"batch": {"global_batch_size": 12, "microbatch_size": 4}, "train": {"steps": 3}}
    return tiny_config(**{**defaults, **sections})


def image_data(size: int, channels: int = 3, samples: int = 24) -> ArrayDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, channels, size, size, generator=generator)
    return ArrayDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def small_vgg(dropout: float = 0.0) -> Model:
    return vgg(((4, 4), (8, 8), (16, 16)), 16, hidden=16, classes=CLASSES, dropout=dropout)


def small_wide_resnet() -> Model:
    return wide_resnet((1, 1, 1, 1), 33, width=4, factor=2, classes=CLASSES)


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
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in profile(model).layers:
        shapes |= {parameter.name: parameter.shape for parameter in layer.parameters}
        shapes |= {buffer.name: buffer.shape for buffer in layer.buffers}
    return shapes


def assert_equal_tensors(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, others[name]), name


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A file as the format's own library writes it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
