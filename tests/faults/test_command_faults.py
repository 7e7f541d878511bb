"""Faults of checkpoints, data, hosts and launchers before a start of the command."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mpirun import Finished, run_mpirun
from support.preparing import write_tokens
from support.resuming import records_of

from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS

COMMAND = ["-m", "axsparse.train", "--config", "tiny.yaml", "--run-dir", "run", "--resume", "auto"]
STEPS = 5
CONFIG = f"""\
model: {{num_layers: 2, hidden_size: 16, num_heads: 2, sequence_length: 8, vocab_size: 300}}
data: {{source: tokens, path: data}}
layout: {{g_inter: 1}}
batch: {{global_batch_size: 4, microbatch_size: 2}}
train: {{steps: {STEPS}, eval_every: 0, eval_steps: 0, peak_flops: 1.0e+9}}
checkpoint: {{every: 1, keep_last: {STEPS}}}
"""
FILE = "0001-block0.safetensors"
WORLDS_OF_ONE = """
import os, sys
for name in [*os.environ]:
    if name.startswith(("PMI_FD", "PMI_PORT", "PMIX_", "PRTE_")):
        del os.environ[name]
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A rank whose MPI library does not find its launcher, which has said how many there are."""


def start(folder: Path, ranks: int = 1) -> Finished:
    return run_mpirun(ranks, COMMAND, cwd=folder)


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records_of(folder / "run", "loss")}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, data and a run, of which every step is saved."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "tiny.yaml").write_text(CONFIG)
    write_tokens(folder / "data")
    done = start(folder, ranks=2)
    assert done.returncode == 0, str(done)
    assert list(losses(folder)) == list(range(1, STEPS + 1))
    return folder


@pytest.fixture
def here(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "here"))


def checkpoint(folder: Path, step: int = STEPS) -> Path:
    return folder / "run" / CHECKPOINTS / f"step-{step}"


# -- damaged checkpoints --------------------------------------------------------------------


def truncate(saved: Path) -> None:
    os.truncate(saved / FILE, 100)


def flip(saved: Path) -> None:
    with (saved / FILE).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def remove(saved: Path) -> None:
    (saved / FILE).unlink()


def remove_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: f"{FILE} has 100 bytes, its manifest says {{size}}",
    flip: f"{FILE} has another hash than its manifest says",
    remove: f"{FILE} cannot be read (No such file or directory)",
    remove_manifest: "manifest.json cannot be read (No such file or directory)",
}


@pytest.mark.fault(6, 7, 8, 20)
def test_damaged_checkpoints_are_passed_over_whatever_the_clock_says_of_them(here: Path) -> None:
    """One of each kind; and the older a checkpoint, the newer it looks."""
    before = losses(here)
    size = (checkpoint(here) / FILE).stat().st_size
    for step in range(1, STEPS + 1):
        os.utime(checkpoint(here, step), (2e9 - step, 2e9 - step))
    steps = list(range(STEPS, STEPS - len(DAMAGES), -1))
    for step, damage in zip(steps, DAMAGES, strict=True):
        damage(checkpoint(here, step))

    done = start(here, ranks=2)

    assert done.returncode == 0, str(done)
    named = f"run/{CHECKPOINTS}/step-"
    told = [line for line in done.stdout.splitlines() if line.startswith("axsparse: ")]
    assert told == [
        *(
            f"axsparse: passed over: checkpoint {named}{step}: {words.format(size=size)}; take "
            "another one"
            for step, words in zip(steps, DAMAGES.values(), strict=True)
        ),
        f"axsparse: goes on from {named}1, after step 1",
    ]
    assert losses(here) == before


# -- what does not fit ----------------------------------------------------------------------


@pytest.mark.fault(10)
def test_a_checkpoint_of_another_vocabulary_is_refused(here: Path) -> None:
    (here / "tiny.yaml").write_text(CONFIG.replace("vocab_size: 300", "vocab_size: 310"))

    assert start(here).error(78) == (
        f"model.vocab_size (tiny.yaml:1): 310, but checkpoint run/{CHECKPOINTS}/step-{STEPS} was "
        "saved with 300; set it back, or start another run"
    )


@pytest.mark.fault(19)
def test_data_that_were_cut_short_since_are_refused(here: Path) -> None:
    os.truncate(here / "data" / "train.tokens", 700)

    said = start(here).error(65)

    assert said.startswith("data.path: data/train.tokens has 700 bytes, tokens.json says 800")


@pytest.mark.fault(13)
@pytest.mark.launcher
def test_ranks_that_do_not_find_each_other_are_refused_once(here: Path) -> None:
    done = run_mpirun(2, ["-c", WORLDS_OF_ONE, *COMMAND], cwd=here)

    line = done.error(78)
    assert line.startswith("MPI: size 1, but ")
    assert " is 2: launcher and MPI library do not know each other; " in line


WAITS_A_MOMENT = """
import os, sys
from axsparse.runtime import connection, process
from axsparse.runtime.mpi import mpi_transport
if any(os.environ.get(name) == "1" for name in process.LAUNCHER_VARIABLES):
    os._exit(3)
mpi_transport.NOTICE_SECONDS, mpi_transport.START_SECONDS = 1.0, 3.0
connection.connect()
"""


def test_a_host_that_lacks_a_package_ends_the_job_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ImportError('no such library here')\n")
    words = ["-m", "axsparse.train", "--config", "quickstart.yaml"]
    other = ["env", f"PYTHONPATH={tmp_path}", sys.executable, *words]

    done = run_mpirun(1, [*words, ":", "-n", "1", *other])

    assert done.returncode == 70, str(done)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("axsparse: error:")]
    assert line.startswith("axsparse: error: host ")
    assert line.endswith(": ImportError: no such library here")


def test_a_rank_that_is_gone_before_mpi_starts_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(WAITS_A_MOMENT)

    done = run_mpirun(2, [str(script)])

    assert done.returncode > 0, str(done)
    said = [line for line in done.stderr.splitlines() if line.startswith("axsparse: ")]
    # Open MPI's launcher ends the others by itself.
    if said or "Exit code:    3" not in done.stderr:
        notice, error = said
        assert " waits for all 2 ranks to start MPI, as a first Trainer does; after 3 s" in notice
        assert ": not all 2 ranks have started MPI within 3 s; see what the missing" in error
