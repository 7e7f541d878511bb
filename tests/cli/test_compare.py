"""`axsparse compare`: runs that are the same, and where others part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.resuming import ran
from support.runs import tiny_config, token_data
from torch import Tensor

from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.update import _Step
from axsparse.training.checkpoint.checkpoint_folder import manifest_bytes, read_manifest

SETTINGS = {
    "train": {"steps": 3, "compare_replicas_every": 2, "eval_every": 3, "eval_steps": 1},
    "checkpoint": {"every": 1, "keep_last": 9},
    "samo": {"gradient": "exact"},
    "batch": {"global_batch_size": 6, "microbatch_size": 2},
}


def run_of(folder: Path, layout: tuple[int, int] = (1, 1)) -> Path:
    ran(layout, tiny_config(**SETTINGS), folder, validation=token_data(samples=9))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("original") / "run")


def test_runs_of_other_layouts_are_the_same(
    original: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    other = run_of(tmp_path / "other", (2, 3))
    shutil.rmtree(other / "checkpoints" / "step-2")

    code, out, err = axsparse("compare", original, other)

    assert (code, err) == (0, "")
    assert out == "the same: 4 records and 2 checkpoints (steps 1, 3)\n"

    shutil.rmtree(other / "checkpoints" / "step-3")
    _, out, _ = axsparse("compare", original, other)
    assert out == "the same: 4 records and 1 checkpoint (step 1)\n"


def test_the_first_step_and_layer_that_differ_are_named(
    original: Path, tmp_path: Path, axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight, after the second step."""
    apply = _Step.apply

    def spoil(step: _Step, layer: LayerState, statistics: dict[str, Tensor]) -> None:
        apply(step, layer, statistics)
        if step.hyper.step == 2 and layer.name == "block1":
            layer.by_full_name["block1.fc1.bias"].weight_D[5] += 1

    monkeypatch.setattr(_Step, "apply", spoil)
    other = run_of(tmp_path / "other")

    code, out, err = axsparse("compare", original, other)

    assert (code, err) == (1, "")
    step, checkpoint = out.splitlines()
    losses = [
        record["loss"]
        for run in (original, other)
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if record["step"] == 3 and "loss" in record
    ]
    assert step == f"step 3: loss is {losses[0]!r} and {losses[1]!r}"
    assert checkpoint == "checkpoint of step 2: 0002-block1.safetensors of layer block1 differs"


def test_a_loss_that_is_no_number_and_another_standing_are_differences(
    original: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    other = Path(shutil.copytree(original, tmp_path / "other"))
    records = (other / "metrics.jsonl").read_text().splitlines()
    spoilt = [line.replace('"eval_loss":', '"eval_loss": null, "was":') for line in records]
    (other / "metrics.jsonl").write_text("\n".join(spoilt) + "\n")
    manifest = read_manifest(other / "checkpoints" / "step-2")
    progress = manifest.progress.model_copy(update={"loss_scale": 2.0})
    changed = manifest_bytes(manifest.model_copy(update={"progress": progress}))
    (other / "checkpoints" / "step-2" / "manifest.json").write_bytes(changed)

    code, out, _ = axsparse("compare", original, other)

    assert code == 1
    record, checkpoint = out.splitlines()
    assert record.startswith("step 3: eval_loss is ") and record.endswith(" and None")
    assert checkpoint == "checkpoint of step 2: progress.loss_scale is 1.0 and 2.0"


def test_checkpoints_that_cannot_be_read_are_left_out(
    original: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    other = shutil.copytree(original, tmp_path / "other")
    (other / "checkpoints/step-2/manifest.json").write_text("")

    code, out, err = axsparse("compare", original, other)

    left_out, same = out.splitlines()
    assert (code, err) == (0, "")
    assert (
        left_out.startswith(f"left out: checkpoint {other}/checkpoints/step-2: ")
        and ";" not in left_out
    )
    assert same.endswith("2 checkpoints (steps 1, 3)")


def test_a_run_whose_checkpoints_cannot_be_listed_is_refused(
    original: Path, tmp_path: Path, axsparse: Axsparse
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(original / "metrics.jsonl", other)
    (other / "checkpoints").symlink_to("checkpoints")

    said = axsparse("compare", original, other)

    text = (
        f"compare: {other}/checkpoints cannot be read (Too many levels of symbolic links); "
        "name a run that you may read"
    )
    assert_one_line(said, 66, text)
