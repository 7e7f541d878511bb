"""Data sets of images in ImageNet's folder layout: root/train/<class>/*, root/val/<class>/*.

Files are decoded, cropped and flipped in views customary for ImageNet. Pillow is imported inside
the functions, since it is an optional dependency (`pip install 'axsparse[images]'`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

if TYPE_CHECKING:
    from PIL import Image

TRAINING, VALIDATION = "train", "val"
"""Names of the folders of the two splits."""
ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of image files, in upper or lower case; other files and hidden ones are ignored."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images: red, green and blue in [0, 1]."""
SMALLEST_AREA = 0.08
"""A training crop has at least this fraction of the image's area (Szegedy et al. 2015, sec. 6)."""
NARROWEST, WIDEST = 3 / 4, 4 / 3
"""Bounds of the ratio of a crop's width to its height (ibid.)."""
TRIES = 10
"""Attempts to draw a crop that lies within the image; after these the middle is taken."""
CENTRE = 224 / 256
"""Validation scales the shorter side to size / CENTRE and takes the middle. (Krizhevsky et al.
2012: 256 and 224 pixels.)"""
NUMBERS = 4 * TRIES + 1
"""Random numbers of one view: four for each attempt at a crop, and one for the flip."""
_BITS = 53
"""Random bits of a number in [0, 1): as many as a double holds."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels, right and bottom excluded."""


class View(NamedTuple):
    """One sample as the model sees it: everything that its pixels depend on."""

    path: str
    size: int
    """Pixels of each side of the result."""
    key: tuple[int, int, int] | None
    """(seed, epoch, sample), which decide crop and flip; None takes the middle, unflipped."""


def render(view: View) -> bytes:
    """The pixels of a view: bytes of a (size, size, 3) array of red, green and blue.

    Raises whatever Pillow raises for a file that is not a complete image.
    """
    from PIL import Image

    # Opened here, since Pillow forgets to close a file that it cannot seek in, such as a pipe.
    with Path(view.path).open("rb") as file, Image.open(file) as opened:
        image = opened.convert("RGB")
    if view.key is None:
        return _middle(image, view.size).tobytes()
    numbers = uniforms(NUMBERS, *view.key)
    # Crop before resizing: `resize` with a box would use pixels beyond the edges of the box.
    part = image.crop(crop_box(image.width, image.height, numbers[:-1]))
    part = part.resize((view.size, view.size), Image.Resampling.BILINEAR)
    if numbers[-1] < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels: bytes = part.tobytes()
    return pixels


def crop_box(width: int, height: int, numbers: list[float]) -> Box:
    """A random part of an image, from 4 × TRIES `numbers` uniform in [0, 1).

    Its area, as a fraction of the image's, is uniform in [SMALLEST_AREA, 1]; the logarithm of
    its ratio of width to height is uniform in [log NARROWEST, log WIDEST]; and its position
    within the image is uniform.
    """
    for number in range(TRIES):
        area, ratio, left, top = numbers[4 * number : 4 * number + 4]
        pixels = (SMALLEST_AREA + (1 - SMALLEST_AREA) * area) * width * height
        shape = NARROWEST * (WIDEST / NARROWEST) ** ratio
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    # No attempt fitted, as in narrow images: take the largest centred part of an allowed ratio.
    w = min(width, max(1, round(height * WIDEST)))
    h = min(height, max(1, round(width / NARROWEST)))
    return _centred(width, height, w, h)


def uniforms(count: int, *key: int) -> list[float]:
    """`count` random numbers in [0, 1), determined by a key, the same on every platform."""
    text = "\x1f".join(map(str, ("axsparse.augment", *key)))
    digest = hashlib.shake_256(text.encode()).digest(8 * count)
    words = (int.from_bytes(digest[at : at + 8], "big") for at in range(0, len(digest), 8))
    return [(word >> (64 - _BITS)) / 2**_BITS for word in words]


def _middle(image: Image.Image, size: int) -> Image.Image:
    from PIL import Image

    shorter = max(size, round(size / CENTRE))
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop(_centred(width, height, size, size))


def _centred(width: int, height: int, w: int, h: int) -> Box:
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# -- folders --------------------------------------------------------------------------------


class Decoders:
    """`count` threads that decode images, which are created when the first view is started.

    Pillow decodes and scales without Python's lock, so that threads work in parallel with each
    other and with the training step. With `count` 0, views are decoded when they are fetched, by
    the thread that fetches them. Any thread may call the methods; callers bound the number of
    started views by fetching them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, view: View) -> Callable[[], bytes]:
        """Begin to decode a view; the returned function waits for its pixels (see `render`).

        That function raises DataError if the file is not a complete image.
        """
        if self._count == 0:
            return lambda: _pixels(view)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._count, "axsparse-decode")
            return self._pool.submit(_pixels, view).result

    def close(self) -> None:
        """End the threads; to fetch a view that was not begun raises. `start` makes new ones."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None


def _pixels(view: View) -> bytes:
    try:
        return render(view)
    except Exception as error:
        # Error messages are one line.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise DataError(
            f"{view.path}: not an image that can be read ({reason}); repair it, or take it out of "
            "the folder on all hosts"
        ) from error


class ImageFolder:
    """The images of one split, a `PartedDataset`; each folder is a class.

    Classes are numbered in the order of their names, and images class by class in the order of
    theirs. Inputs are (b, 3, size, size) fp32, normalised by MEAN and STD; targets are (b,) int64.
    Only names are read at first. An image is decoded when it is needed; a file that cannot be
    decoded ends the run with its path. (It cannot be skipped: the last stage has read its
    label, and never sees the image.)
    """

    vocab_size = None
    targets_per_sample = 1

    def __init__(
        self, root: Path, split: str, *, size: int, decoders: Decoders, seed: int | None
    ) -> None:
        """With a `seed`, crops and flips are random, keyed by (seed, epoch, sample). Without
        one, the middle of each image is taken.

        Raises ConfigError if Pillow is not installed, MissingInputError if the folder does not
        exist, DataError if it holds no class, or a class no image.
        """
        if importlib.util.find_spec("PIL") is None:
            raise ConfigError(
                "data.source images: Pillow, which decodes images, is not installed; "
                "pip install 'axsparse[images]'"
            )
        self._root = root / split
        self._size = size
        self._decoders = decoders
        self._seed = seed
        self.classes = _folders(self._root)
        self.name = f"images {self._root}"
        digest = hashlib.blake2b(digest_size=16)
        counts, lengths, names = [], [], []
        for folder in self.classes:
            files = _files(self._root / folder)
            digest.update(os.fsencode("\0".join([folder, *files, ""])))
            counts.append(len(files))
            encoded = [os.fsencode(file) for file in files]
            lengths += [len(file) for file in encoded]
            names.append(b"".join(encoded))
        self.fingerprint = digest.hexdigest()
        # All names are kept as one bytes object: a million strings would take 100 MB on each rank.
        self._names = b"".join(names)
        self._name_ends = np.cumsum(lengths, dtype=np.int64)
        self._class_ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._name_ends)

    def path(self, sample: int) -> Path:
        """The path of a sample's file."""
        begin = self._name_ends[sample - 1] if sample else 0
        name = os.fsdecode(self._names[begin : self._name_ends[sample]])
        return self._root / self.classes[self._class_of(sample)] / name

    def start(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to decode images; their pixels are normalised when they are fetched.

        The returned function raises DataError for a file that cannot be decoded.
        """
        pending = [
            self._decoders.start(self._view(sample, epoch))
            for sample, epoch in zip(indices.tolist(), epochs.tolist(), strict=True)
        ]
        return lambda: (self._normalised([pixels() for pixels in pending]),)

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """The number of each sample's class, (b,) int64."""
        return torch.from_numpy(np.searchsorted(self._class_ends, indices, side="right"))

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()

    def close(self) -> None:
        """End the threads that decode, which data sets may share."""
        self._decoders.close()

    def _view(self, sample: int, epoch: int) -> View:
        key = None if self._seed is None else (self._seed, epoch, sample)
        return View(str(self.path(sample)), self._size, key)

    def _class_of(self, sample: int) -> int:
        return int(np.searchsorted(self._class_ends, sample, side="right"))

    def _normalised(self, pixels: Sequence[bytes]) -> Tensor:
        shape = (len(pixels), self._size, self._size, 3)
        bright = torch.frombuffer(bytearray(b"".join(pixels)), dtype=torch.uint8).view(shape)
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        # The memory format has to be named: by itself `to` would leave the channels last.
        images = bright.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return images.div_(255).sub_(mean).div_(std)


def image_folders(
    root: Path, *, size: int, workers: int, seed: int, validate: bool
) -> tuple[ImageFolder, ImageFolder | None]:
    """The training and validation images below `root`, which share `workers` threads.

    The validation images are None unless `validate`. Raises what `ImageFolder` raises, and
    DataError if the two splits differ in their classes.
    """
    decoders = Decoders(workers)
    training = ImageFolder(root, TRAINING, size=size, decoders=decoders, seed=seed)
    if not validate:
        return training, None
    validation = ImageFolder(root, VALIDATION, size=size, decoders=decoders, seed=None)
    if validation.classes != training.classes:
        odd = sorted(set(validation.classes) ^ set(training.classes))[0]
        where = TRAINING if odd in training.classes else VALIDATION
        raise DataError(
            f"data.path {root}: class {odd} is in {where} only, so that classes would be numbered "
            f"differently; give {TRAINING} and {VALIDATION} the same folders"
        )
    return training, validation


def _folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except FileNotFoundError:
        raise MissingInputError(
            f"data.path: there is no folder {root}; images lie in {TRAINING}/<class>/ and "
            f"{VALIDATION}/<class>/ below data.path (train.eval_steps 0 needs no {VALIDATION})"
        ) from None
    except OSError as error:
        raise _unreadable(error) from error
    if not names:
        raise DataError(f"data.path: {root} holds no folders; each class is one")
    return names


def _files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if _is_image(e.name))
    except OSError as error:
        raise _unreadable(error) from error
    if not names:
        raise DataError(
            f"data.path: class {folder} holds no images (files ending in {', '.join(ENDINGS)}); "
            "fill it or take it away"
        )
    return names


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _unreadable(error: OSError) -> DataError:
    return DataError(
        f"data.path: {error.filename} cannot be listed ({error.strerror}); "
        "make it a readable folder"
    )
