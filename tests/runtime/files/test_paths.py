"""Paths that users write, wherever a program or a command takes one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Axsparse
from support.runs import mlp, vector_data

import axsparse as ax
from axsparse.models.start_weights import open_weights
from axsparse.pruning.mask_file import open_masks


def trainer(**settings: Any) -> ax.Trainer:
    settings = {"global_batch_size": 6, "microbatch_size": 3, "steps": 1, **settings}
    return ax.Trainer(mlp(), vector_data(), **settings)


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
}


@pytest.mark.parametrize("use", USES)
def test_a_program_names_paths_as_in_a_shell(use: str, home: Path) -> None:
    (home / "made").mkdir()
    if use in ("weights", "masks"):
        trainer(quiet=True).save_mask(home / "run" / "mask.safetensors")

    USES[use]()

    assert len([*(home / "made").iterdir()]) == (use in ("export", "mask"))
    assert not [*Path().iterdir()]


def test_an_option_of_a_command_names_paths_as_in_a_shell(axsparse: Axsparse, home: Path) -> None:
    done = axsparse("export", "~/run", "--to", "torch", "--out=~/w.safetensors")

    assert done[0] == 0, done
    assert (home / "w.safetensors").is_file() and not [*Path().iterdir()]
