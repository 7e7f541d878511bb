"""The directory and the data of a run in the hands of their user: no rank guesses about them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from mpi4py import MPI
from support.on_mpi import on_mpi
from support.preparing import write_tokens
from support.runs import tiny_config, tiny_gpt, with_layout

from axsparse.config.schema import Config
from axsparse.data.sources import open_datasets
from axsparse.runtime.errors import AxsparseError
from axsparse.runtime.files.run_folder import LOCK_FILE
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.training.trainer import build

SIZE = MPI.COMM_WORLD.size
Change = Callable[[Path], object]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of all ranks, with prepared tokens."""
    comm = MPI.COMM_WORLD
    path = Path(comm.bcast(tempfile.mkdtemp() if not comm.rank else None, root=0))
    monkeypatch.chdir(path)
    by_rank_0(lambda _: write_tokens(path / "data", tokens=400, vocab=64))
    yield path
    by_rank_0(lambda _: shutil.rmtree(path))


def by_rank_0(change: Change, run: Path = Path("run")) -> None:
    """Change something in the folder while the other ranks wait, which have left it."""
    MPI.COMM_WORLD.barrier()
    if not MPI.COMM_WORLD.rank:
        change(run)
    MPI.COMM_WORLD.barrier()


def wanted(steps: int) -> Config:
    config = tiny_config(
        batch={"global_batch_size": 4, "microbatch_size": 1},
        data={"source": "tokens", "path": "data"},
        checkpoint={"every": 2},
        train={"steps": steps},
        run_dir="run",
    )
    return with_layout(config, Grid(SIZE, 1)).with_origins("tiny", {"run_dir": "--run-dir"})


def train(config: Config, resume: str | None = None) -> None:
    with on_mpi() as transport:
        data = partial(open_datasets, config)
        build(Job(transport), tiny_gpt(config), data, config, resume=resume).train()


def said_by_all(config: Config) -> str:
    """The line of every rank with its exit code."""
    with pytest.raises(AxsparseError) as ended:
        train(config, "auto")
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


def cut_short(_: Path) -> None:
    os.truncate("data/train.tokens", 20)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_mark, "78 run has checkpoints, but no whole run.json"),
        (mount_away, "66 run has saved checkpoints, and run/checkpoints has none; mo"),
        (cut_short, "65 data.path: data/train.tokens has 20 bytes, tokens.json says 800"),
    ],
)
def test_every_rank_refuses_what_may_not_be_the_run_and_changes_nothing(
    change: Change, line: str, here: Path
) -> None:
    train(wanted(4))
    by_rank_0(change)
    before = contents(here)

    said = said_by_all(wanted(6))

    assert said.startswith(line), said
    assert contents(here) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """All that is in a folder, apart from the lock of a run."""
    MPI.COMM_WORLD.barrier()
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != LOCK_FILE}
