"""The part of an image that a model sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from axsparse.data.images.augmentation import (
    NARROWEST,
    NUMBERS,
    SMALLEST_AREA,
    TRIES,
    WIDEST,
    View,
    crop_box,
    render,
    uniforms,
)


def ramp(folder: Path, width: int, height: int) -> Path:
    """An image whose red grows to the right and whose green grows downwards."""
    red = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    green = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    pixels = np.stack([red, green, np.full_like(red, 7)], axis=2).astype(np.uint8)
    path = folder / "ramp.png"
    Image.fromarray(pixels).save(path)
    return path


def pixels_of(path: Path, size: int, key: tuple[int, int, int] | None) -> NDArray[np.uint8]:
    flat = np.frombuffer(render(View(str(path), size, key)), dtype=np.uint8)
    return flat.reshape(size, size, 3)


def test_numbers_depend_on_every_part_of_their_key_and_on_nothing_else() -> None:
    keys = [(seed, epoch, sample) for seed in range(4) for epoch in range(4) for sample in range(4)]
    drawn = {tuple(uniforms(3, *key)) for key in keys}

    assert len(drawn) == len(keys)
    assert uniforms(2, 1, 23) != uniforms(2, 12, 3)
    assert uniforms(3, 1, 2, 3) == uniforms(3, 1, 2, 3)
    # These numbers must never change, so that a run sees the same crops on every machine.
    assert uniforms(2, 1234, 5, 6) == [0.9323594424662051, 0.16728612232053008]


def test_numbers_are_uniform() -> None:
    drawn = np.array([uniforms(NUMBERS, 1, 2, sample) for sample in range(2000)])

    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 0.03  # 4.6 standard errors
    assert np.abs(drawn.std(axis=0) - 12**-0.5).max() < 0.02


@settings(deadline=None, derandomize=True)
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=4 * TRIES, max_size=4 * TRIES),
)
def test_a_crop_lies_within_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, top, right, bottom = crop_box(width, height, numbers)

    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_crops_have_the_areas_and_shapes_of_imagenet() -> None:
    boxes = np.array([crop_box(1000, 800, uniforms(4 * TRIES, 0, 0, n)) for n in range(2000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, ratios = widths * heights / 800_000, widths / heights

    assert SMALLEST_AREA - 0.002 < areas.min() < 0.1
    assert areas.max() > 0.9
    assert NARROWEST - 0.01 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < WIDEST + 0.01
    assert np.median(ratios) == pytest.approx(1, abs=0.05)
    assert boxes[:, 0].min() == boxes[:, 1].min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (1000, 800)


@pytest.mark.parametrize(
    ("size", "box"), [((300, 30), (130, 0, 170, 30)), ((30, 300), (0, 130, 30, 170))]
)
def test_a_narrow_image_falls_back_to_its_middle(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    # No allowed ratio of a crop with the full area fits into this image.
    assert crop_box(*size, [0.999] * 4 * TRIES) == box


def test_training_sees_the_part_within_the_box(tmp_path: Path) -> None:
    path = ramp(tmp_path, 240, 160)
    key = next((3, 0, n) for n in range(99) if uniforms(NUMBERS, 3, 0, n)[-1] >= 0.5)
    left, top, right, bottom = crop_box(240, 160, uniforms(NUMBERS, *key)[:-1])

    seen = pixels_of(path, 16, key)

    expected = (
        Image.open(path)
        .crop((left, top, right, bottom))
        .resize((16, 16), Image.Resampling.BILINEAR)
    )
    assert np.array_equal(seen, np.asarray(expected))


def test_every_second_training_image_is_mirrored(tmp_path: Path) -> None:
    path = ramp(tmp_path, 64, 64)
    flipped = 0
    for sample in range(200):
        red = pixels_of(path, 8, (0, 0, sample))[0, :, 0].astype(int)
        mirrored = red[0] > red[-1]
        assert mirrored == (uniforms(NUMBERS, 0, 0, sample)[-1] < 0.5)
        flipped += mirrored

    assert 70 < flipped < 130


@pytest.mark.parametrize("size", [(512, 256), (256, 512), (256, 256), (100, 80), (1, 300)])
def test_validation_sees_the_middle(size: tuple[int, int], tmp_path: Path) -> None:
    path = ramp(tmp_path, *size)

    seen = pixels_of(path, 224, None).astype(int)

    assert seen.shape == (224, 224, 3)
    for across, colour in zip(size, (0, 1), strict=True):
        share = 224 / 256 * min(size) / across  # of the image's side
        if across < 80:
            continue  # too few pixels for a ramp
        row = seen[112, :, 0] if colour == 0 else seen[:, 112, 1]
        assert row[0] == pytest.approx(127.5 * (1 - share), abs=3)
        assert row[-1] == pytest.approx(127.5 * (1 + share), abs=3)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "I;16", "LA"])
def test_images_of_all_kinds_become_three_colours(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new(mode, (40, 30)).save(path)

    for key in (None, (0, 0, 0)):
        assert pixels_of(path, 8, key).shape == (8, 8, 3)
