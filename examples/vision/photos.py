"""Photographs in ImageNet's folders, root/train/<class>/* and root/val/<class>/*, and the training
of an image classifier on them. Pillow decodes: pip install pillow."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import axsparse as ax

ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
SMALLEST_AREA, NARROWEST, WIDEST, TRIES = 0.08, 3 / 4, 4 / 3, 10
"""Bounds of random crops, as parts of the image's area and as ratios of width to height (Szegedy et
al. 2015, section 6)."""
CENTRE = 224 / 256
"""Validation takes the middle of an image whose shorter side is size / CENTRE."""


class Photos(Dataset[tuple[Tensor, int]]):
    """The images of one folder, whose folders are the classes: (3, size, size) fp32, and a class.

    With `is_augmented`, crops and flips are drawn by torch, which `ax.from_torch` seeds by epoch
    and sample.
    """

    def __init__(self, root: Path, size: int, *, is_augmented: bool) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self._files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in ENDINGS
        ]
        self._size = size
        self._view = random_view if is_augmented else middle

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        path, number = self._files[sample]
        try:
            with Image.open(path) as opened:
                image = self._view(opened.convert("RGB"), self._size)
        except OSError as error:
            raise RuntimeError(f"{path}: not an image that can be read ({error})") from error
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return (pixels / 255 - MEAN) / STD, number


def random_view(image: Image.Image, size: int) -> Image.Image:
    """A random part of an image, scaled, and mirrored half of the time."""
    left, top, width, height = crop(image.width, image.height)
    part = image.crop((left, top, left + width, top + height))
    part = part.resize((size, size), Image.Resampling.BILINEAR)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else part


def crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random part; of the full image where TRIES do not fit."""
    for _ in range(TRIES):
        area, ratio, x, y = torch.rand(4).tolist()
        pixels = (SMALLEST_AREA + (1 - SMALLEST_AREA) * area) * width * height
        shape = NARROWEST * (WIDEST / NARROWEST) ** ratio
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(x * (width - w + 1)), int(y * (height - h + 1)), w, h
    return 0, 0, width, height


def middle(image: Image.Image, size: int) -> Image.Image:
    """The middle of a scaled image."""
    shorter = max(size, round(size / CENTRE))
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, top, left + size, top + size))


def image_folders(root: Path, size: int) -> ax.Datasets:
    """The images below root/train and root/val."""
    training = Photos(root / "train", size, is_augmented=True)
    validation = Photos(root / "val", size, is_augmented=False)
    if training.classes != validation.classes:
        raise SystemExit(f"{root}: train and val have other classes")
    return ax.Datasets(ax.from_torch(training), ax.from_torch(validation))


def classifier(name: str, layers: Sequence[ax.Layer], size: int) -> ax.Model:
    """A model of layers that takes images of `size` pixels a side and gives logits."""
    return ax.Model(
        layers,
        lambda logits, classes: F.cross_entropy(logits.float(), classes, reduction="sum"),
        name=name,
        metrics={"top1": ax.count_top1},
        example=lambda samples: (torch.zeros(samples, 3, size, size, device="meta"),),
    )


def he_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 2 / fan-out), the start of a convolution (He et al. 2015, equation 14)."""
    fan_out = shape[0] * math.prod(shape[2:])
    return torch.empty(shape).normal_(0.0, math.sqrt(2 / fan_out), generator=generator)


def train(build: Callable[[int], ax.Model], settings: Path, size: int = 224) -> None:
    """Train the model on the folder that the command names first; key=value follow."""
    root, *changes = sys.argv[1:]
    config = ax.configure(settings, changes)
    ax.Trainer(build(size), partial(image_folders, Path(root), size), config).train()
