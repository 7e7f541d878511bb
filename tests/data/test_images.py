"""Image folders in ImageNet's layout."""

from __future__ import annotations

import importlib.util
import os
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from axsparse.data.batches import Batches
from axsparse.data.images import (
    MEAN,
    NARROWEST,
    NUMBERS,
    SMALLEST_AREA,
    STD,
    TRIES,
    WIDEST,
    Decoders,
    ImageFolder,
    View,
    crop_box,
    image_folders,
    render,
    uniforms,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

CLASSES = {"cat": 3, "ant": 4, "bee": 1}


def make_image(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((20, 30, 3), shade, dtype=np.uint8)
    pixels[:, :10] //= 2
    Image.fromarray(pixels).save(path)


def make_split(root: Path, split: str) -> None:
    for name, count in CLASSES.items():
        for number in range(count):
            make_image(root / split / name / f"{name}_{number}.png", 40 * number + len(name))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        make_split(tmp_path, split)
    return tmp_path


def folder(root: Path, split: str = "train", seed: int | None = 5, workers: int = 0) -> ImageFolder:
    return ImageFolder(root, split, size=16, decoders=Decoders(workers), seed=seed)


def test_samples_are_numbered_class_by_class_in_the_order_of_names(root: Path) -> None:
    data = folder(root)

    assert data.classes == ["ant", "bee", "cat"]
    assert len(data) == 8
    assert [data.path(n).relative_to(root / "train").as_posix() for n in range(8)] == [
        *(f"ant/ant_{n}.png" for n in range(4)),
        "bee/bee_0.png",
        *(f"cat/cat_{n}.png" for n in range(3)),
    ]
    targets = data.targets(np.arange(8))
    assert targets.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert targets.dtype == torch.int64


def test_only_images_count(root: Path) -> None:
    names = [data.path(n).name for data in [folder(root)] for n in range(len(data))]
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    (root / "train" / "ant" / "._ant_0.png").write_text("left by a file manager")
    (root / "train" / "README").write_text("no class")
    (root / "train" / ".cache").mkdir()
    make_image(root / "train" / "bee" / "bee_1.PNG", 9)
    make_image(root / "train" / "bee" / "bee_2.JPEG", 9)

    after = folder(root)

    assert [after.path(n).name for n in range(len(after))] == [
        *names[:5],
        "bee_1.PNG",
        "bee_2.JPEG",
        *names[5:],
    ]


def test_names_in_any_alphabet_are_found_again_and_take_few_bytes(tmp_path: Path) -> None:
    name = "größe_\udcff.png"  # as the system shows a byte that is no UTF-8
    make_image(tmp_path / "train" / "Äpfel" / "a.png", 9)
    (tmp_path / "train" / "Äpfel" / "a.png").rename(tmp_path / "train" / "Äpfel" / name)

    data = folder(tmp_path)

    assert data.path(0) == tmp_path / "train" / "Äpfel" / name
    assert data._names.__sizeof__() + data._name_ends.nbytes + data._class_ends.nbytes < 100


def test_the_fingerprint_covers_every_name_and_its_class(root: Path) -> None:
    prints = {folder(root).fingerprint, folder(root, "val").fingerprint}
    assert len(prints) == 1  # the same names

    (root / "train" / "ant" / "ant_0.png").rename(root / "train" / "ant" / "ant_9.png")
    prints.add(folder(root).fingerprint)
    (root / "train" / "ant" / "ant_9.png").rename(root / "train" / "bee" / "ant_9.png")
    prints.add(folder(root).fingerprint)
    (root / "train" / "bee").rename(root / "train" / "bees")
    prints.add(folder(root).fingerprint)

    assert len(prints) == 4


def test_inputs_are_normalised_channels_first(root: Path) -> None:
    data = folder(root, "val", seed=None)

    (images,) = data.start(np.array([1, 7]), np.zeros(2, dtype=np.int64))()

    assert (images.shape, images.dtype) == ((2, 3, 16, 16), torch.float32)
    assert images.is_contiguous()
    for image, sample in zip(images, (1, 7), strict=True):
        raw = np.frombuffer(render(View(str(data.path(sample)), 16, None)), dtype=np.uint8)
        expected = raw.reshape(16, 16, 3) / 255
        for channel in range(3):
            shown = image[channel].double().numpy() * STD[channel] + MEAN[channel]
            assert np.allclose(shown, expected[:, :, channel], atol=1e-6)


def test_crops_and_flips_are_keyed_by_seed_epoch_and_sample(root: Path) -> None:
    data = folder(root, seed=5)

    (images,) = data.start(np.array([6, 2]), np.array([3, 4]))()

    for image, key in zip(images, ((5, 3, 6), (5, 4, 2)), strict=True):
        raw = render(View(str(data.path(key[2])), 16, key))
        shown = image * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        assert (shown * 255).round().to(torch.uint8).permute(1, 2, 0).numpy().tobytes() == raw


def batches_of(data: ImageFolder, replica: int, g_data: int) -> Batches:
    return Batches(
        data,
        num_samples=len(data),
        global_batch_size=6,
        microbatch_size=1,
        replica=replica,
        g_data=g_data,
        seed=7,
    )


def pixels(root: Path, step: int, *, workers: int = 0, g_data: int = 1) -> list[bytes]:
    """The microbatches of a step, of all replicas."""
    found = []
    for replica in range(g_data):
        batches = batches_of(folder(root, workers=workers), replica, g_data)
        found += [m.inputs[0].numpy().tobytes() for m in batches.training(step).microbatches]
        batches.close()
    return found


def test_a_missing_folder_is_named_where_it_is_needed(tmp_path: Path) -> None:
    make_split(tmp_path, "train")
    assert image_folders(tmp_path, size=16, workers=0, seed=5, validate=False)[1] is None

    with pytest.raises(
        MissingInputError,
        match=r"data\.path: there is no folder .*/val; images lie in train/<class>/ and "
        r"val/<class>/ below data\.path \(train\.eval_steps 0 needs no val\)",
    ):
        image_folders(tmp_path, size=16, workers=0, seed=5, validate=True)


def test_a_class_in_one_split_only_is_named(root: Path) -> None:
    make_image(root / "val" / "dog" / "dog.png", 1)

    with pytest.raises(
        DataError, match=r"class dog is in val only, so that classes would be numbered differently"
    ):
        image_folders(root, size=16, workers=0, seed=5, validate=True)


def test_folders_that_hold_no_images_are_named(root: Path, tmp_path: Path) -> None:
    (root / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=r"class .*/train/dog holds no images \(files ending in"):
        folder(root)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"/none holds no folders; each class is one"):
        folder(tmp_path, "none")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(DataError, match=r"/file cannot be listed \(Not a directory\); make it"):
        folder(tmp_path, "file")


def test_without_pillow_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(
        ConfigError,
        match=r"Pillow, which decodes images, is not installed; pip install 'axsparse\[images\]'",
    ):
        folder(root)


# -- threads that decode --------------------------------------------------------------------


def decoding_threads() -> int:
    return sum(thread.name.startswith("axsparse-decode") for thread in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_number_of_threads_gives_the_same_pixels_in_the_order_asked_for(
    count: int, root: Path
) -> None:
    paths = [*(root / "train").rglob("*.png")] * 3
    views = [View(str(p), 6, None if n % 2 else (1, 2, n)) for n, p in enumerate(paths)]
    decoders = Decoders(count)
    assert decoding_threads() == 0

    for _ in range(2):  # closed decoders come back when they are needed
        fetch = [decoders.start(view) for view in views]
        assert decoding_threads() == count
        assert [pixels() for pixels in fetch] == [render(view) for view in views]
        decoders.close()
        decoders.close()
        assert decoding_threads() == 0


def test_closing_ends_what_still_waits(root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    decoders = Decoders(1)
    stuck = decoders.start(View(str(tmp_path / "pipe.png"), 6, None))
    behind = decoders.start(View("never", 6, None))
    closing = threading.Thread(target=decoders.close)
    with (tmp_path / "pipe.png").open("wb"):  # which waits for the thread
        closing.start()
        with pytest.raises(CancelledError):
            behind()

    closing.join()
    with pytest.raises(DataError, match="not an image"):
        stuck()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.png", b""),
        ("text.png", b"no image"),
        ("cut.png", None),
        ("gone.png", None),
        ("gone_\udcff.png", None),  # a byte that is no UTF-8
    ],
)
def test_a_broken_image_is_named_and_harms_no_other(
    name: str, content: bytes | None, count: int, root: Path
) -> None:
    good, broken = View(str(root / "train" / "ant" / "ant_0.png"), 6, None), root / name
    if name == "cut.png":
        Image.effect_noise((64, 64), 50).save(broken)
        content = broken.read_bytes()[:-400]
    if content is not None:
        broken.write_bytes(content)
    decoders = Decoders(count)

    first, second, third = map(decoders.start, (good, View(str(broken), 6, None), good))

    assert first() == third() == render(good)
    with pytest.raises(
        DataError,
        match=r"/\w+\W*\.png: not an image that can be read \(\w+: .+\); "
        r"repair it, or take it out of the folder on all hosts",
    ):
        second()
    decoders.close()


# -- the part of an image that a model sees -------------------------------------------------


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
