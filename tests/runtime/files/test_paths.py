"""Paths that users write, wherever a program or a command takes one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Axsparse, assert_one_line
from support.hf import write_llama
from support.preparing import write_tokens
from support.runs import mlp, tiny_config, tiny_gpt, vector_data

import axsparse as ax
from axsparse.models.start_weights import open_weights
from axsparse.planner.cluster import cluster_text
from axsparse.pruning.mask_file import open_masks
from axsparse.runtime.errors import MissingInputError
from axsparse.runtime.files.paths import kind_of


def trainer(**settings: Any) -> ax.Trainer:
    settings = {"global_batch_size": 6, "microbatch_size": 3, "steps": 1, **settings}
    return ax.Trainer(mlp(), vector_data(), **settings)


def of_folder(folder: str, data: Any = None) -> ax.Trainer:
    given = vector_data() if data is None else data
    return ax.Trainer(ax.hf(folder), given, quiet=True, global_batch_size=1, microbatch_size=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    trainer(run_dir=path).train()
    return path


@pytest.fixture
def home(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run in it, and another folder to work in."""
    home, here = tmp_path / "home", tmp_path / "here"
    shutil.copytree(saved, home / "run")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    return home


USES: dict[str, Callable[[], object]] = {
    "load": lambda: ax.load("~/run"),
    "export": lambda: ax.export("~/run", "torch", "$HOME/made/w.safetensors"),
    "weights": lambda: open_weights("~/run/mask.safetensors"),
    "masks": lambda: open_masks("${HOME}/run"),
    "mask": lambda: trainer(quiet=True).save_mask("~/made/mask.safetensors"),
    "config": lambda: ax.configure("~/run/config.yaml"),
    "resume": lambda: trainer(resume="~/run").close(),
    "run_dir": lambda: trainer(run_dir="~/made/run").train(),
    "load_pruned": lambda: ax.load_pruned("$HOME/model", fewest_zeros=None),
    "save_hf": lambda: of_folder("~/model").save_hf("~/made/model"),
    "cluster": lambda: ax.plan_for(tiny_gpt(tiny_config()), "~/laptop.yaml", 2),
    "model": lambda: ax.configure(None, ["model.from=$HOME/model"]),
    "tokens": lambda: of_folder("~/model", ax.tokens("$HOME/tokens", validation="~/tokens")),
}


@pytest.mark.parametrize("use", USES)
def test_a_program_names_paths_as_in_a_shell(use: str, home: Path) -> None:
    (home / "made").mkdir()
    if use in ("weights", "masks"):
        trainer(quiet=True).save_mask(home / "run" / "mask.safetensors")
    if use in ("load_pruned", "save_hf", "model", "tokens"):
        write_llama(home / "model")
        write_tokens(home / "tokens", 99, vocab=32)
    (home / "laptop.yaml").write_text(cluster_text("laptop"))

    USES[use]()

    assert len([*(home / "made").iterdir()]) == (use in ("export", "mask", "save_hf", "run_dir"))
    assert not [*Path().iterdir()]


@pytest.mark.parametrize(
    "line",
    [
        "export ~/run --to torch --out=~/made/w.safetensors",
        "report $HOME/run --out=$HOME/made/page.html",
        "compare ~/run ${HOME}/run",
        "data prepare ~/text.txt --validation ~/more.txt --train-bpe 260 --out ~/made/tokens",
        "plan --config ~/c.yaml --cluster ~/laptop.yaml --gpus 1",
        "plan ~/c.yaml --gpus 1",
        "prune --dry-run --config ~/c.yaml",
        "prune --dry-run --from ~/model --sparsity 0.5",
        "config show --config ~/c.yaml --set data.path=~/x --set data.source=tokens",
        "submit --slurm --ranks 2 --time 1:00:00 --config ~/c.yaml --setup ~/text.txt",
    ],
)
def test_options_of_commands_name_paths_as_in_a_shell(
    line: str, axsparse: Axsparse, home: Path
) -> None:
    (home / "made").mkdir()
    for name in ("text.txt", "more.txt"):
        (home / name).write_text(f"{name} and words\n" * 99)
    (home / "laptop.yaml").write_text(cluster_text("laptop"))
    write_llama(home / "model")
    (home / "c.yaml").write_text("model: {num_layers: 1, hidden_size: 8, num_heads: 2}\n")

    done = axsparse(*line.split())

    assert done[0] == 0, done
    assert len([*(home / "made").iterdir()]) == ("made" in line)
    assert not [*Path().iterdir()]


LONG = "a" * 300
"""A path of which the system does not say what is there, as of one in another user's folder."""


@pytest.mark.parametrize(
    "line",
    [
        "config show --config LONG",
        "plan --config LONG --gpus 2",
        "plan LONG --gpus 2",
        "plan --cluster LONG --gpus 2",
        "generate LONG --prompt x",
        "export LONG --to sparse --out x",
        "submit --slurm --ranks 2 --time 1:00:00 --config quickstart.yaml --setup LONG",
        "train --config LONG",
        "config show --set model.from=LONG",
        "plan --config quickstart.yaml --gpus 1 --set train.teacher=LONG",
    ],
)
def test_a_path_that_the_system_does_not_tell_of_is_a_line(line: str, axsparse: Axsparse) -> None:
    said = axsparse(*line.replace("LONG", LONG).split())

    assert_one_line(said, 66, "cannot be read (File name too long); name one that can be read")
    assert LONG in said[2]


def test_a_mask_file_that_the_system_does_not_tell_of_is_refused() -> None:
    with pytest.raises(MissingInputError, match="cannot be read"):
        open_masks(LONG)


def test_what_is_at_a_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert kind_of("here", tmp_path) == "folder"
    assert kind_of("here", tmp_path / "file") == "file"
    assert kind_of("here", Path("/dev/null")) == "other"
    assert kind_of("here", tmp_path / "nothing") == kind_of("here", tmp_path / "file/in") == ""
