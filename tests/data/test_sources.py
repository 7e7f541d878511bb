"""The data sets that a configuration can name, in runs up to metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.mpirun import Finished, run_mpirun

import axsparse as ax
from axsparse.config.load import load_config
from axsparse.data.dataset import ArrayDataset, TokenDataset
from axsparse.data.images import ImageFolder
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError

SHADES = {"dark": 40, "light": 220}
IMAGES = [
    *("model.name=cnn", "model.num_classes=2", "data.source=images", "data.image_size=8"),
    *("batch.global_batch_size=8", "layout.g_inter=2", "pruning.sparsity=0.5", "precision=fp32"),
    *("train.eval_every=3", "train.log_every=1", "train.peak_flops=1e12", "train.steps=6"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of noise, one dark and one light."""
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 5)):
        for name, shade in SHADES.items():
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(shade - 30, shade + 30, (14, 17, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def flags(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def train(ranks: int, folder: Path, *settings: str) -> Finished:
    command = ["-m", "axsparse.train", "--run-dir", str(folder / "run"), *flags(*settings)]
    return run_mpirun(ranks, command, cwd=folder)


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_digits_are_opened_by_name() -> None:
    settings = ["model.name=cnn", "model.channels=1", "model.num_classes=10", "data.source=digits"]

    data = open_datasets(load_config(None, settings))

    assert isinstance(data.training, ArrayDataset)
    assert (data.training.name, len(data.training)) == ("digits train", 1437)
    assert data.validation is not None
    assert (data.validation.name, len(data.validation)) == ("digits validation", 360)


def test_files_are_told_apart_for_a_model_that_separates_them() -> None:
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    tiny = "model_type: llama, hidden_size: 8, num_attention_heads: 1, num_hidden_layers: 1"
    asked = ["model.name=hf", f"model.hf={{{tiny}, vocab_size: 256, max_position_embeddings: 64}}"]
    for settings, inputs in (([*asked, "data.separate_documents=true"], 2), (asked, 1)):
        loaded = load_config(None, settings)
        datasets, example = open_datasets(loaded), named_model(loaded).example
        assert example is not None
        assert len(example(1)) == inputs
        for dataset in (datasets.training, datasets.validation):
            assert isinstance(dataset, TokenDataset)
            assert len(dataset.read(np.arange(1))[0]) == inputs


def test_the_model_of_a_configuration_has_a_public_name_for_data_of_ones_own() -> None:
    settings = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9}

    model = ax.named_model(ax.configure({"model": settings}))

    assert [layer.name for layer in model.layers] == ["embed", "block0", "head"]
    assert model.vocab_size == 9


def test_images_are_opened_as_the_settings_say(root: Path) -> None:
    found: list[torch.Tensor] = []
    for seed in (3, 4):
        data = open_datasets(load_config(None, [*IMAGES, f"data.path={root}", f"seed={seed}"]))
        assert isinstance(data.training, ImageFolder)
        assert data.training._decoders._count == 2
        assert data.validation is not None and len(data.validation) == 10
        found += data.training.start(np.array([0]), np.array([0]))()
        data.training.close()

    assert found[0].shape == (1, 3, 8, 8)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ["model.channels=1", "model.num_classes=9", "data.source=digits"],
            r"model\.num_classes \(--set\): 9 is below the 10 classes of digits; choose 10",
        ),
        (["data.source=images", "model.num_classes=1"], r"1 is below the 2 classes of images .*;"),
    ],
)
def test_a_model_has_an_output_for_every_class(settings: list[str], text: str, root: Path) -> None:
    loaded = load_config(None, ["model.name=cnn", f"data.path={root}", *settings])

    with pytest.raises(ConfigError, match=text):
        open_datasets(loaded)


@pytest.mark.exhaustive
def test_images_train_over_mpi_alike_in_all_layouts_and_with_any_workers(
    root: Path, tmp_path: Path
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    settings = [*IMAGES, f"data.path={root}", "train.eval_first=true", "batch.microbatch_size=4"]

    first = train(1, one, *settings, "layout.g_inter=1", "data.workers=0")
    second = train(2, many, *settings, "data.workers=1")

    assert first.returncode == 0, first
    assert second.returncode == 0, second
    for ours, reference in zip(records(many), records(one), strict=True):
        if "loss" in reference:
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    # Later losses depend on running statistics, which each replica computes from its samples.
    assert records(many)[0] == records(one)[0]
    evaluations = [record for record in records(many) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 3, 6]
    assert set(evaluations[0]) == {"step", "eval_loss", "top1"}
    assert " samples/s  eta " in second.stdout
    assert "validation loss" in second.stdout and "perplexity" not in second.stdout


@pytest.mark.exhaustive
def test_a_broken_image_ends_the_job_with_its_path(root: Path, tmp_path: Path) -> None:
    broken = root / "train" / "light" / "7.png"
    broken.write_bytes(broken.read_bytes()[:300])

    done = train(2, tmp_path, *IMAGES, f"data.path={root}")

    assert done.returncode == 65, done
    (line,) = done.errors
    assert line.startswith(f"axsparse: error: rank 0 (stage 0, replica 0): {broken}: not an image")
