"""Checkpoints are believed only if they fit the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import ran, settings
from support.runs import FEW_MICROBATCHES, tiny_config

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.runtime.files.safetensors import SafetensorsFile, header_of, write_safetensors
from axsparse.training.checkpoint.checkpoint_folder import CheckpointManifest, manifest_bytes
from axsparse.training.checkpoint.layer_files import CheckpointFiles, load_layers
from axsparse.training.checkpoint.verification import (
    is_complete,
    open_checkpoint,
    read_entry,
    verify,
)


def config_of(**sections: Any) -> Config:
    sections = {"batch": FEW_MICROBATCHES, **sections}
    return tiny_config(train={"steps": 5}, checkpoint={"every": 2}, **sections)


@pytest.fixture
def run(run: Path) -> Path:
    """With its last checkpoint only."""
    for step in (2, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    return run


def folder_of(run: Path) -> Path:
    return run / "checkpoints" / "step-5"


def forge(run: Path, change: Callable[[dict[str, torch.Tensor]], object], layer: str) -> None:
    """Change the tensors of a layer's file, with sizes and hashes that belong to them."""
    folder = folder_of(run)
    manifest = open_checkpoint(folder).manifest
    path = folder / manifest.layers[layer].file
    file = SafetensorsFile(path)
    tensors = {name: file.read(name) for name in file.shapes}
    change(tensors)
    path.unlink()
    headers = {name: header_of(tensor) for name, tensor in tensors.items()}
    write_safetensors(path, headers, iter(tensors.values()))
    entries = {**manifest.files, path.name: read_entry(folder, path.name)}
    rewrite(run, lambda m: m.model_copy(update={"files": entries}))


def rewrite(run: Path, change: Callable[[CheckpointManifest], CheckpointManifest]) -> None:
    folder = folder_of(run)
    manifest = change(open_checkpoint(folder).manifest)
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest))


NAME = "block0.fc1.weight"


def flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"mask/{NAME}"][0] ^= 1


def shorten(kind: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{kind}/{NAME}"] = tensors[f"{kind}/{NAME}"][:-1]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip, "'master/.*' is float32 .*, this run has float32 .*; take another one"),
        (shorten("mask"), "'mask/.*' is uint8 .*, this run has uint8 .*; take another one"),
        (shorten("master"), "'master/.*' is float32 .*, this run has float32 .*; take"),
        (shorten("exp_avg"), "'exp_avg/.*' is float32 .*, this run has float32 "),
        (
            lambda tensors: tensors.pop(f"master/{NAME}"),
            f"safetensors lacks 'master/{NAME}'; take another one",
        ),
    ],
)
def test_forged_files_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, run: Path
) -> None:
    forge(run, change, "block0")
    assert is_complete(folder_of(run))

    with pytest.raises(DataError, match=rf"^checkpoint {run}/checkpoints/step-5: .*{words}"):
        ran((1, 1), config_of(), run, resume="auto")
    if change is flip:
        with pytest.raises(
            DataError, match=rf"mask of {NAME} keeps \d+ entries, its manifest says"
        ):
            ax.load(run)


def test_a_file_that_goes_after_it_was_verified_is_missed(run: Path) -> None:
    checkpoint = open_checkpoint(folder_of(run))
    (checkpoint.path / "0001-block0.safetensors").unlink()

    with pytest.raises(
        MissingInputError, match=r"0001-block0.safetensors cannot be read \(No such file"
    ):
        CheckpointFiles(checkpoint).headers("block0")


# -- what does not fit ----------------------------------------------------------------------


def test_another_run_is_refused_and_nothing_is_touched(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}

    with pytest.raises(ConfigError, match=r"^seed \(default\): 12, but checkpoint .* with 11"):
        ran((2, 1), config_of(seed=12), run, resume="auto")

    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert {**after, "run.lock": b""} == {**before, "run.lock": b""}


def test_other_layers_of_the_same_parameters_are_refused(run: Path) -> None:
    rewrite(run, lambda m: m.model_copy(update={"layers": dict(reversed(m.layers.items()))}))

    with pytest.raises(DataError, match="its layers are head, block1, block0, embed, the model's"):
        ran((1, 1), config_of(), run, resume="auto")


def test_what_may_change_is_told_where_it_changes_the_numbers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        config_of(),
        train={"steps": 7, "log_every": 1, "eval_every": 2},
        optimizer={"learning_rate": 0.5, "learning_rates": ("head.*=0.1", "block1.*=0")},
        checkpoint={"every": 1, "keep_last": 9},
        pipeline={"extra_in_flight": 2, "schedule": "gpipe"},
        samo={"index": "int32"},
    )

    ran((2, 1), config, run, resume="auto")

    told = [line for line in capsys.readouterr().out.splitlines() if " is now " in line]
    assert told == [
        "axsparse: optimizer.learning_rate is now 0.5, before it was 0.01",
        "axsparse: optimizer.learning_rates is now ['head.*=0.1', 'block1.*=0'], before it was []",
        "axsparse: schedule.decay_steps is now 7, before it was 5",
    ]


def test_the_file_of_the_first_weights_may_have_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own weights are its checkpoint's, so that only a first file is refused."""
    ran((1, 1), config_of(model={"weights": "old"}), tmp_path / "moved")
    capsys.readouterr()

    ran((1, 1), config_of(model={"weights": "new"}), tmp_path / "moved", resume="auto")

    told = [line for line in capsys.readouterr().out.splitlines() if " is now " in line]
    assert told == ["axsparse: model.weights is now 'new', before it was 'old'"]


def test_a_rank_reads_the_files_of_its_own_layers_only(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []
    read_part = SafetensorsFile.read_part
    stage = ""

    def reading(self: SafetensorsFile, name: str, start: int, stop: int) -> torch.Tensor:
        opened.append((stage, self.path.name))
        return read_part(self, name, start, stop)

    def load(*arguments: Any) -> None:
        nonlocal stage
        stage = "+".join(layer.spec.name for layer in arguments[1])
        load_layers(*arguments)
        stage = ""

    monkeypatch.setattr(SafetensorsFile, "read_part", reading)
    monkeypatch.setattr("axsparse.training.build.load_layers", load)

    ran((2, 1), config_of(), run, resume="auto")

    files = {name: {file[5:-12] for stage, file in opened if stage == name} for name, _ in opened}
    assert files["embed+block0"] == {"embed", "block0"}
    assert files["block1+head"] == {"block1", "head", "embed"}  # the tied weight


# -- files that are not as they were written ------------------------------------------------


def test_a_byte_that_has_changed_is_found_in_every_file(run: Path) -> None:
    checkpoint = open_checkpoint(folder_of(run))
    verify(checkpoint)
    assert is_complete(folder_of(run)) and len(checkpoint.manifest.files) > 2
    for name in checkpoint.manifest.files:
        contents = (folder_of(run) / name).read_bytes()
        (folder_of(run) / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))

        with pytest.raises(DataError, match=f"{name} has another hash than its manifest says"):
            verify(checkpoint)
        verify(checkpoint, set(checkpoint.manifest.files) - {name})
        assert not is_complete(folder_of(run))
        (folder_of(run) / name).write_bytes(contents)
