"""The image classifiers of examples/vision: the published networks, and small ones that train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from photos import Photos, image_folders
from PIL import Image
from support.images import assert_same_in_1_to_4_stages, image_config, shapes_of
from support.mpirun import run_mpirun
from support.page_blocks import ROOT
from torch import Tensor, nn
from vgg19 import vgg, vgg19
from wideresnet101 import wide_resnet, wide_resnet101_2

from axsparse.data.torch_dataset import from_torch
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.state_bytes import StateFormat

VISION = ROOT / "examples" / "vision"
SHADES = {"dark": 40, "light": 220}


def small_vgg(dropout: float = 0.5) -> Model:
    return vgg(((4, 4), (8, 8)), 16, hidden=16, classes=2, dropout=dropout)


def small_wide_resnet() -> Model:
    return wide_resnet((1, 2, 1, 1), 33, width=4, factor=2, classes=2)


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


# -- what is computed ---------------------------------------------------------------------


def state_of(model: Model, seed: int = 2) -> tuple[dict[str, Tensor], list[nn.Module]]:
    """Start values by torchvision's names, and the modules that have them."""
    options = StateOptions(StateFormat(torch.float32, torch.float32), seed=seed, masks=None)
    layers = build_layers(model.layers, {}, options)
    state = {
        f"{layer.spec.name}.{name}".removeprefix("stem."): tensor.detach()
        for layer in layers
        for name, tensor in layer.module.state_dict().items()
    }
    return state, [layer.module.eval() for layer in layers]


def of_vgg(state: dict[str, Tensor], x: Tensor) -> Tensor:
    for number in (0, 2, 5, 7):
        at = f"features.{number}"
        x = F.relu(F.conv2d(x, state[f"{at}.weight"], state[f"{at}.bias"], padding=1))
        x = F.max_pool2d(x, 2) if number in (2, 7) else x
    x = F.adaptive_avg_pool2d(x, 7).flatten(1)
    for number in (0, 3, 6):
        at = f"classifier.{number}"
        x = F.linear(F.relu(x) if number else x, state[f"{at}.weight"], state[f"{at}.bias"])
    return x


def of_wide_resnet(state: dict[str, Tensor], x: Tensor) -> Tensor:
    def conv(name: str, norm: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)
        means = (state[f"{norm}.running_mean"], state[f"{norm}.running_var"])
        return F.batch_norm(x, *means, state[f"{norm}.weight"], state[f"{norm}.bias"])

    x = F.max_pool2d(F.relu(conv("conv1", "bn1", x, stride=2, padding=3)), 3, 2, 1)
    for group, blocks in enumerate((1, 2, 1, 1), start=1):
        for block in range(blocks):
            at, stride = f"layer{group}.{block}", 2 if group > 1 and block == 0 else 1
            hidden = F.relu(conv(f"{at}.conv1", f"{at}.bn1", x))
            hidden = F.relu(conv(f"{at}.conv2", f"{at}.bn2", hidden, stride, padding=1))
            hidden = conv(f"{at}.conv3", f"{at}.bn3", hidden)
            if block == 0:
                x = conv(f"{at}.downsample.0", f"{at}.downsample.1", x, stride)
            x = F.relu(hidden + x)
    return F.linear(x.mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(
    ("model", "reference", "size"),
    [(small_vgg(), of_vgg, 16), (small_wide_resnet(), of_wide_resnet, 33)],
    ids=["vgg", "wide_resnet"],
)
def test_they_compute_what_their_weights_compute_by_torchvisions_names(
    model: Model, reference: Callable[[dict[str, Tensor], Tensor], Tensor], size: int
) -> None:
    state, modules = state_of(model)
    x = torch.randn(5, 3, size, size, generator=torch.Generator().manual_seed(1))

    ours = x
    for module in modules:
        ours = module(ours)

    assert torch.equal(ours, reference(state, x))


@pytest.mark.parametrize(
    ("model", "size"),
    [
        pytest.param(small_vgg(), 16, id="vgg"),
        pytest.param(small_wide_resnet(), 33, id="wide_resnet", marks=pytest.mark.exhaustive),
    ],
)
def test_they_train_on_folders_bitwise_alike_on_one_to_four_stages(
    model: Model, size: int, root: Path
) -> None:
    config = image_config(train={"steps": 3, "eval_steps": 1})
    data = image_folders(root, size)

    [(trainer, trace)] = assert_same_in_1_to_4_stages(
        model, config, data.training, validation=data.validation
    )

    assert len(set(trace.losses)) == 3
    assert trainer.last_evaluation is not None


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
