"""Reading a configuration: accepted values, their origin, and the messages for mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from axsparse.config import load
from axsparse.config.load import configure, full_key, to_yaml
from axsparse.config.messages import FOREIGN_KEYS
from axsparse.config.schema import FIELDS, Config

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes `run.yaml` and returns its path."""

    def write_file(text: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8", newline="")
        return str(file)

    return write_file


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree's folder of two bundled configs, next to a package without one."""
    folder = tmp_path / "tree" / "configs"
    folder.mkdir(parents=True)
    (folder / "quickstart.yaml").write_text("seed: 1\n", encoding="utf-8")
    (folder / "gpt3_2.7b.yaml").write_text("seed: 2\n", encoding="utf-8")
    monkeypatch.setattr(load, "PACKAGE", tmp_path / "tree" / "axsparse")
    monkeypatch.chdir(tmp_path)
    return folder


# --- what is taken -----------------------------------------------------------------------


def test_a_name_of_several_sections_is_that_in_train() -> None:
    assert full_key("eval_steps") == "train.eval_steps"


def test_names_of_other_libraries_are_of_keys_that_there_are() -> None:
    """tests/errors has some of the lines."""
    assert {own.partition(",")[0] for own in FOREIGN_KEYS.values()} <= FIELDS.keys()
    assert not FOREIGN_KEYS.keys() & FIELDS.keys()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("epochs", "train.steps, a number of steps"),
        ("warmup_ratio", "schedule.warmup_steps, a number of steps"),
        ("gradient_accumulation_steps", "batch.microbatch_size, the samples of a microbatch"),
        ("gradient_checkpointing", "pipeline.checkpoint_activations, 1 for all layers"),
        ("bf16", "precision, such as bf16"),
        ("dp", "layout.g_data"),
        ("pruning.enabled", "pruning.sparsity, 0 for none"),
    ],
)
def test_a_name_of_another_library_is_our_key(theirs: str, ours: str) -> None:
    assert FOREIGN_KEYS[theirs] == ours


def test_without_a_file_everything_is_default() -> None:
    assert configure(None) == Config()


def test_keys_know_where_they_were_set(write: Write) -> None:
    file = write("seed: 7\n\nbatch:\n  # small\n  microbatch_size: 4\n  global_batch_size: 48\n")

    loaded = configure(file, ["batch.global_batch_size=96"])

    assert loaded.where("seed") == "seed (run.yaml:1)"
    assert loaded.where("batch.microbatch_size") == "batch.microbatch_size (run.yaml:5)"
    assert loaded.where("batch.global_batch_size") == "batch.global_batch_size (--set)"
    assert loaded.where("precision") == "precision (default)"
    assert set(loaded.origins) == {"seed", "batch.microbatch_size", "batch.global_batch_size"}


def test_later_overrides_win_over_earlier_ones_and_over_the_file(write: Write) -> None:
    loaded = configure(write("seed: 1\ntrain: {steps: 5}\n"), ["seed=2", " seed = 3 "])

    assert (loaded.seed, loaded.train.steps) == (3, 5)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("1e+3", 1e3), (".5", 0.5), ("5.", 5.0), ("+0.25", 0.25)],
)
def test_floats_are_those_of_yaml_1_2(write: Write, text: str, value: float) -> None:
    file = write(f"optimizer: {{learning_rate: {text}}}\n")

    assert configure(file).optimizer.learning_rate == value
    overrides = [f"optimizer.learning_rate={text}"]
    assert configure(None, overrides).optimizer.learning_rate == value


@pytest.mark.parametrize(
    ("text", "value"), [("yes", "yes"), ("1_000", "1_000"), ("1:30", "1:30"), ("'12'", "12")]
)
def test_what_only_yaml_1_1_takes_for_a_value_is_text(text: str, value: str) -> None:
    assert configure(None, [f"run_dir={text}"]).run_dir == value


def test_a_path_may_be_given_as_such(tmp_path: Path) -> None:
    assert configure({"run_dir": tmp_path}).run_dir == str(tmp_path)


def test_numbers_and_arrays_of_numpy_and_torch_are_those_of_python() -> None:
    values = {
        "train.steps": np.int64(2),
        "optimizer.learning_rate": torch.tensor(0.5),
        "optimizer.betas": np.array([0.5, 0.75]),
        "layout.split": (np.int32(1), 3),
    }

    config = configure(values)

    assert config.train.steps == 2
    assert config.optimizer.learning_rate == 0.5
    assert config.optimizer.betas == (0.5, 0.75)
    assert config.layout.split == (1, 3)
    assert configure(yaml.safe_load(to_yaml(config))) == config


def test_lists_anchors_and_a_byte_order_mark_are_read(write: Write) -> None:
    file = write("\ufeffseed: &n 3\ntrain: {steps: *n}\nlayout:\n  split:\n  - 4\n  - *n\n")

    config = configure(file)

    assert (config.train.steps, config.layout.split) == (3, (4, 3))


# --- bundled configs ---------------------------------------------------------------------


@pytest.mark.parametrize("source", ["gpt3_2.7b", "gpt3_2.7b.yaml"])
def test_a_bundled_config_is_found_by_name(bundled: Path, source: str) -> None:
    loaded = configure(source)

    assert (loaded.name, loaded.seed) == ("gpt3_2.7b", 2)


def test_a_file_of_the_same_name_goes_before_a_bundled_config(bundled: Path) -> None:
    Path("quickstart.yaml").write_text("seed: 5\n", encoding="utf-8")

    assert configure("quickstart.yaml").seed == 5
    assert configure("quickstart").seed == 1


def test_a_script_takes_a_file_and_overrides_as_the_command_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 3\ntrain:\n  steps: 7\n")

    config = configure(path, ["train.steps=9", "precision=fp32"])

    loaded = config.model_copy(update={"seed": 5}).named("model")
    assert (loaded.seed, loaded.train.steps, loaded.name) == (5, 9, "mine")
    assert loaded.where("seed") == "seed (configure)"
    assert loaded.where("train.steps") == "train.steps (--set)"
    assert loaded.where("precision") == "precision (--set)"
    assert config == configure({"seed": 3, "train": {"steps": 9}, "precision": "fp32"})
