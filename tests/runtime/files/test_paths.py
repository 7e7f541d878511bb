"""Paths that users write, wherever a program or a command takes one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Axsparse
from support.hf import write_llama
from support.preparing import write_tokens
from support.runs import mlp, tiny_config, tiny_gpt, vector_data

import axsparse as ax
from axsparse.models.start_weights import open_weights
from axsparse.planner.cluster import cluster_text
from axsparse.pruning.mask_file import open_masks


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

    assert len([*(home / "made").iterdir()]) == (use in ("export", "mask", "save_hf"))
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
