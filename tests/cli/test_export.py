"""`axsparse export`: which checkpoint is meant, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
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
    [
        (["RUN"], 4),
        (["RUN", "--step", "2"], 2),
        (["RUN/checkpoints/step-2"], 2),
    ],
)
def test_the_newest_checkpoint_is_meant_or_the_one_that_is_named(
    arguments: list[str],
    step: int,
    run: Path,
    tmp_path: Path,
    axsparse: Axsparse,
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


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["RUN", "--to", "torch"], 78, "the following arguments are required: --out"),
        (["RUN", "--out", "OUT"], 78, "the following arguments are required: --to"),
        (["RUN", "--to", "onnx", "--out", "OUT"], 78, "invalid choice: 'onnx'"),
        (
            ["RUN/checkpoints/step-2", "--step", "2", "--to", "hf", "--out", "OUT"],
            78,
            "is a checkpoint already; leave --step out",
        ),
        (
            ["RUN", "--step", "3", "--to", "hf", "--out", "OUT"],
            66,
            "has no checkpoint of step 3; choose one of 4, 2",
        ),
        (
            ["RUN/checkpoints", "--to", "hf", "--out", "OUT"],
            66,
            "holds no checkpoint; name a run that has saved one, or a checkpoint",
        ),
        (
            ["RUN/checkpoints/step-9", "--to", "hf", "--out", "OUT"],
            66,
            "manifest.json cannot be read",
        ),
        (["RUN", "--to", "hf", "--out", "RUN"], 74, "is not what an export leaves, and stays"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    arguments: list[str],
    code: int,
    words: str,
    run: Path,
    tmp_path: Path,
    axsparse: Axsparse,
) -> None:
    known = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    for short, path in known.items():
        arguments = [text.replace(short, path) for text in arguments]

    assert_one_line(axsparse("export", *arguments), code, words)
    assert list(tmp_path.iterdir()) == []
