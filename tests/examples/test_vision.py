"""The image classifiers of examples/vision: the published networks, and small ones that train."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import Photos, image_folders
from PIL import Image
from support.cases import ONE_STAGE, PlannedModel, Row, batch, judge
from support.images import shapes_of, small_vgg, small_wide_resnet
from support.mpirun import run_mpirun
from support.page_blocks import ROOT
from torch import Tensor
from vgg19 import vgg19
from wideresnet101 import wide_resnet101_2

from axsparse.data.dataset import Dataset
from axsparse.data.torch_dataset import from_torch
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile

VISION = ROOT / "examples" / "vision"
SHADES = {"dark": 40, "light": 220}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise, one dark and one light."""
    random, root = np.random.default_rng(0), tmp_path_factory.mktemp("images")
    for split, count in (("train", 10), ("val", 5)):
        for name, shade in SHADES.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(shade - 30, shade + 30, (14, 17, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


# -- what is published --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tensors", "table", "parameters", "blocks", "flops"),
    [
        (vgg19(224), 38, "d734c0baa6ed46ce", 143_667_240, 17, 2 * 19.63e9),
        (wide_resnet101_2(224), 626, "2a3672e58e80686c", 126_886_696, 33, 2 * 22.75e9),
    ],
    ids=["vgg19", "wide_resnet101_2"],
)
def test_names_shapes_parameters_and_flops_are_those_published(
    model: Model, tensors: int, table: str, parameters: int, blocks: int, flops: float
) -> None:
    """`table` is a digest of the names and shapes of torchvision's state dict."""
    profiled = profile(model)

    shapes = sorted((name.removeprefix("stem."), each) for name, each in shapes_of(model).items())
    assert len(shapes) == tensors
    assert hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest() == table
    assert profiled.num_params == parameters
    kinds = [layer.kind for layer in profiled.layers]
    assert kinds == ["embedding", *["block"] * blocks, "head"]
    assert profiled.flops == pytest.approx(flops, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        pytest.param(small_vgg(0.5), 16, id="vgg"),
        pytest.param(small_wide_resnet(), 33, id="wide_resnet", marks=pytest.mark.exhaustive),
    ],
)
def test_they_train_on_folders_bitwise_alike_on_one_to_four_stages(
    model: Model, size: int, root: Path
) -> None:
    data = image_folders(root, size)
    assert data.validation is not None
    validation: Dataset = data.validation
    settings = {**batch(12, 4), "train": {"steps": 3, "eval_steps": 1}}
    images = PlannedModel(
        "images", lambda _: model, lambda: data.training, lambda: validation, settings
    )

    for stages in (2, 4):
        [(_, trace), *_] = judge(Row((stages, 1), judge=ONE_STAGE, subject=images, order=stages))
        assert len(set(trace.losses)) == 3 and trace.evaluation is not None


# -- images -------------------------------------------------------------------------------


def read(photos: Photos, epochs: Sequence[int]) -> list[Tensor]:
    samples = from_torch(photos)
    return [samples.read(np.array([7]), np.array([epoch]))[0][0] for epoch in epochs]


def test_crops_differ_from_epoch_to_epoch_and_the_middle_does_not(root: Path) -> None:
    training = Photos(root / "train", 8, is_augmented=True)
    validation = Photos(root / "val", 8, is_augmented=False)

    first, again, other = read(training, (0, 0, 1))

    assert (len(training), len(validation), training.classes) == (20, 10, ["dark", "light"])
    assert first.shape == (1, 3, 8, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(*read(validation, (0, 1)))
    assert [training[sample][1] for sample in (0, 9, 10, 19)] == [0, 0, 1, 1]
    assert training[0][0].mean() < -1 and training[10][0].mean() > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_trains_under_mpirun(ranks: int, root: Path, tmp_path: Path) -> None:
    program = tmp_path / "small.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(VISION)!r})\n"
        "from pathlib import Path\n"
        "import axsparse as ax\nfrom photos import train\nfrom vgg19 import vgg\n"
        "def build(size): return vgg(((4, 4), (8, 8)), size, hidden=16, classes=2)\n"
        f"settings = Path({str(VISION / 'vgg19.yaml')!r})\n"
        "train(build, settings, size=16)\n"
    )
    changes = ["train.steps=6", "train.eval_every=3", "batch.global_batch_size=8", "run_dir=run"]

    done = run_mpirun(ranks, [str(program), str(root), *changes], cwd=tmp_path)

    assert done.returncode == 0, done
    assert "top1" in done.stdout and "saved in" in done.stdout
