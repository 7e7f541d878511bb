"""Training and validation views of an image: the crops and the flip customary for ImageNet.

Pillow is imported inside the functions, since it is an optional dependency
(`pip install 'axsparse[images]'`).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

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
