"""The directory and the data of a run in the hands of their user: no rank guesses about them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from support.on_mpi import on_mpi
from support.preparing import write_tokens
from support.runs import summed_loss, tiny_config, tiny_gpt, vector_data, with_layout
from torch import nn

from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data.order import samples_of_step
from axsparse.data.sources import open_datasets
from axsparse.models.sequential import from_sequential
from axsparse.runtime.errors import AxsparseError
from axsparse.runtime.files.run_folder import LOCK_FILE
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.training.trainer import build

SIZE = MPI.COMM_WORLD.size
Change = Callable[[Path], object]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of all ranks, with prepared tokens, which is also the home directory."""
    comm = MPI.COMM_WORLD
    path = Path(comm.bcast(tempfile.mkdtemp() if not comm.rank else None, root=0))
    monkeypatch.chdir(path)
    monkeypatch.setenv("HOME", str(path))
    by_rank_0(lambda _: write_tokens(path / "data", tokens=400, vocab=64))
    yield path
    by_rank_0(lambda _: shutil.rmtree(path))


def by_rank_0(change: Change, run: Path = Path("run")) -> None:
    """Change something in the folder while the other ranks wait, which have left it."""
    MPI.COMM_WORLD.barrier()
    if not MPI.COMM_WORLD.rank:
        change(run)
    MPI.COMM_WORLD.barrier()


def wanted(steps: int, run_dir: str = "run") -> Config:
    config = tiny_config(
        batch={"global_batch_size": 4, "microbatch_size": 1},
        data={"source": "tokens", "path": "data"},
        checkpoint={"every": 2},
        schedule={"decay": "constant", "warmup_steps": 0},
        train={"steps": steps},
        run_dir=run_dir,
    )
    return with_layout(config, Grid(SIZE, 1)).with_origins("tiny", {"run_dir": "--run-dir"})


def train(config: Config, resume: str | None = None) -> dict[int, float]:
    """The losses of a run on all ranks."""
    losses: dict[int, float] = {}
    with on_mpi() as transport:
        data = partial(open_datasets, config)
        trainer = build(Job(transport), tiny_gpt(config), data, config, resume=resume)
        trainer.train(lambda step, result: losses.update({step: result.loss}))
    return losses


def said_by_all(config: Config, resume: str | None) -> str:
    """The line of every rank with its exit code."""
    with pytest.raises(AxsparseError) as ended:
        train(config, resume)
    failure = ended.value
    assert failure.on_all_ranks
    said = MPI.COMM_WORLD.allgather(f"{failure.exit_code} {failure}")
    assert len({*said}) == 1, said
    return str(said[0])


def without_mark(run: Path) -> None:
    """As checkpoints are copied to another machine, without the rest."""
    (run / "checkpoints").rename("kept")
    shutil.rmtree(run)
    run.mkdir()
    Path("kept").rename(run / "checkpoints")


def mount_away(run: Path) -> None:
    (run / "checkpoints").rename("away")


def zeroed(_: Path) -> None:
    tokens = Path("data/train.tokens")
    tokens.write_bytes(bytes(tokens.stat().st_size))


def cut_short(_: Path) -> None:
    os.truncate("data/train.tokens", 20)


def own_settings(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / "config.yaml").write_text("of the user")


REFUSED: dict[str, tuple[Change, str | None, str]] = {
    "checkpoints that were copied": (
        *(without_mark, "auto"),
        "78 run has checkpoints, but no whole run.json",
    ),
    "a new run next to checkpoints": (
        *(without_mark, None),
        "74 run_dir (--run-dir): run has checkpoints, but no whole run.json",
    ),
    "a mount that is away": (
        mount_away,
        "auto",
        "66 run has saved checkpoints, and run/checkpoints has none; mo",
    ),
    "a user's config.yaml": (
        own_settings,
        None,
        "74 run_dir (--run-dir): run has config.yaml, but no whole run.json",
    ),
    "data that are zeroed": (
        *(zeroed, "auto"),
        "65 data.path: data/train.tokens does not have the contents that tokens.json says",
    ),
    "data that are cut short": (
        *(cut_short, "auto"),
        "65 data.path: data/train.tokens has 20 bytes, tokens.json says 800",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_what_may_not_be_the_run_and_changes_nothing(
    name: str, here: Path
) -> None:
    change, resume, line = REFUSED[name]
    train(wanted(4))
    by_rank_0(change)
    before = contents(here)

    said = said_by_all(wanted(6), resume)

    assert said.startswith(line), said
    assert contents(here) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """All that is in a folder, apart from the lock of a run."""
    MPI.COMM_WORLD.barrier()
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != LOCK_FILE}


def test_checkpoints_behind_links_are_gone_on_with_and_those_of_others_stay(here: Path) -> None:
    whole = train(wanted(8, "whole"))
    train(wanted(4))

    def linked(run: Path) -> None:
        (here / "disk").mkdir()
        for step in (run / "checkpoints").iterdir():
            step.rename(here / "disk" / step.name)
            step.symlink_to(here / "disk" / step.name)
        (run / "checkpoints" / "step-1").mkdir()
        (run / "checkpoints" / "step-1" / "notes.txt").write_text("of another program")

    by_rank_0(linked)

    went_on = train(wanted(8), "auto")

    assert went_on == {step: loss for step, loss in whole.items() if step > 4}
    MPI.COMM_WORLD.barrier()
    assert (here / "run" / "checkpoints" / "step-8").is_dir()
    assert [*(here / "run" / "checkpoints").rglob("notes.txt")], "a file of the user's is gone"
    assert {path.name for path in (here / "disk").iterdir()} == {"step-2", "step-4"}


def test_a_home_directory_is_meant_by_its_sign(here: Path) -> None:
    train(wanted(2, "~/mine"))

    MPI.COMM_WORLD.barrier()
    assert (here / "mine" / "checkpoints" / "step-2").is_dir()
    assert not (here / "~").exists()


def thawing(*, is_frozen: bool) -> nn.Sequential:
    torch.manual_seed(1)
    body = nn.Linear(16, 16).requires_grad_(not is_frozen)
    return nn.Sequential(body, nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5))


def test_a_body_that_is_thawed_at_a_resume_trains_on_as_in_plain_torch(here: Path) -> None:
    data, state = vector_data(), None
    for steps in (2, 4):
        config = wanted(steps).with_values({"pruning.sparsity": 0.0, "optimizer.weight_decay": 0.0})
        modules = thawing(is_frozen=steps == 2)
        with on_mpi() as transport:
            trainer = build(
                *(Job(transport), from_sequential(modules, summed_loss), lambda: Datasets(data)),
                config.with_values({"data.source": "stdlib", "optimizer.clip_norm": 0.0}),
                resume=None if steps == 2 else "auto",
            )
            trainer.train()
            state = trainer.state_dict()

    judge = thawing(is_frozen=True)
    settings: Any = {"lr": 1e-2, "betas": config.optimizer.betas, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(judge[2:].parameters(), **settings)
    for step in range(4):
        if step == 2:
            judge.requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": list(judge[0].parameters())})
        optimizer.zero_grad()
        (inputs,), targets = data.read(samples_of_step(len(data), 4, step, config.seed))
        (summed_loss(judge(inputs), targets) / 4).backward()
        optimizer.step()
    assert (state is None) == (MPI.COMM_WORLD.rank > 0)
    for name, value in ({} if state is None else state).items():
        torch.testing.assert_close(value, judge.get_parameter(name).detach(), rtol=0, atol=2e-5)
