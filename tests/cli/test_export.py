"""`axsparse export`: which checkpoint is meant, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Axsparse
from support.resuming import ran
from support.runs import tiny_config

from axsparse.runtime.files.safetensors import SafetensorsFile


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run"
    ran((1, 1), tiny_config(train={"steps": 4}, checkpoint={"every": 2}), path)
    return path


@pytest.mark.parametrize(
    ("arguments", "step"),
    [(["RUN"], 4), (["RUN", "--step", "2"], 2), (["RUN/checkpoints/step-2"], 2)],
)
def test_the_newest_checkpoint_is_meant_or_the_one_that_is_named(
    arguments: list[str], step: int, run: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    out = tmp_path / "out.safetensors"
    named = [text.replace("RUN", str(run)) for text in arguments]

    said = axsparse("export", *named, "--to", "torch", "--out", out)

    path = run / "checkpoints" / f"step-{step}"
    assert said == (0, f"{out}: 28 tensors, 112 kB, of {path} after step {step}\n", "")
    assert SafetensorsFile(out).metadata["step"] == str(step)


def test_each_form_and_option_does_what_it_says(
    run: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"")
    assert axsparse("export", run, "--to", "torch", "--out", path, "--force")[0] == 0
    assert "block0.fc1.weight" in SafetensorsFile(path).shapes
    assert axsparse("export", run, "--to", "hf", "--out", tmp_path / "gpt", "--trained")[0] == 0
    assert (tmp_path / "gpt" / "config.json").is_file()
