"""The command: what it prints, what it leaves behind, what it sends."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest
from support.exhaustive import by_default
from support.mpirun import LONGEST_SECONDS, run_mpirun
from support.resuming import records_of
from support.warm_python import warm_python

from axsparse.observe.metrics import StepRecord
from axsparse.observe.phases import PHASES

SMALL = [
    "--config",
    "quickstart.yaml",
    *("--set", "model.num_layers=2", "--set", "model.hidden_size=64"),
    *("--set", "model.sequence_length=32", "--set", "train.log_every=1"),
    *("--set", "train.eval_every=2", "--set", "train.eval_steps=1"),
    *("--set", "train.peak_flops=1e12", "--set", "batch.global_batch_size=12"),
]


ONE_STAGE = ("--set", "layout.g_inter=1")
DENSE = ("--set", "samo.enabled=false")
LOADED = """
import sys
from pathlib import Path
from axsparse.train import main

try:
    main()
finally:
    from mpi4py import MPI
    loaded = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
    Path(f"loaded-{MPI.COMM_WORLD.rank}").write_text(" ".join(loaded))
"""
"""The command, and the modules that each rank has loaded when it ends, in a separate file."""


@dataclass(frozen=True)
class Trained:
    """The outputs of a run of three steps."""

    screen: str
    folder: Path
    """Its run directory."""


Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(ranks, *options)` is started once, however many tests look at it."""

    @cache
    def run(ranks: int, *options: str) -> Trained:
        folder = tmp_path_factory.mktemp("train")
        command = ["-m", "axsparse.train", *SMALL, "--steps", "3", *options]
        done = run_mpirun(ranks, [*command, "--run-dir", str(folder / "run")], cwd=folder)
        assert done.returncode == 0, done.stderr
        return Trained(done.stdout, folder / "run")

    return run


def test_the_screen_has_a_line_for_each_step_and_evaluation(train: Train) -> None:
    run = train(2)

    *lines, last = run.screen.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("  ")[0] for line in steps] == [
        *("step 1/3", "step 2/3", "step 2/3", "step 3/3", "step 3/3")
    ]
    assert steps[0].startswith("step 1/3  loss 5.") and "tokens/s  eta " in steps[0]
    assert re.search(r"validation loss .* perplexity .*  \(12 of \d+ samples\)$", steps[-1])
    assert last.startswith(f"saved in {run.folder}/checkpoints")


def test_metrics_have_every_field_and_phases_that_add_up(train: Train) -> None:
    run = train(2).folder

    steps = records_of(run, "loss")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["step"] for record in records_of(run, "eval_loss")] == [2, 3]
    for record in steps:
        assert list(record) == [field.name for field in fields(StepRecord)]
        phases = sum(record[f"{phase}_seconds"] for phase in PHASES)
        assert phases == pytest.approx(record["step_seconds"], rel=1e-6)
        for busy in ("compute", "compress", "optimizer", "p2p", "collective"):
            assert record[f"{busy}_seconds"] > 0
        assert record["tokens"] == 12 * 32
        assert record["mfu"] == pytest.approx(record["model_flops_per_second"] / 2e12)
        assert record["peak_memory_bytes"] > 50e6
        assert not record["skipped"]
        assert record["gradient_bytes_sent"] == 0  # one replica
        assert record["p2p_bytes_sent"] > 6 * 2 * 32 * 64 * 2  # activations, in bf16, and a tie


def test_the_saved_configuration_says_what_it_ran_with(train: Train) -> None:
    text = (train(2).folder / "config.yaml").read_text()

    assert "# torch " in text and "# git " in text


def test_ranks_that_do_not_see_one_run_directory_end_before_the_first_step(tmp_path: Path) -> None:
    """A relative path, in a folder of each rank's own."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        f"os.chdir({str(tmp_path)!r} + '/' + rank)\n"
        "from axsparse.train import main\n"
        "main()\n"
    )
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    said = (
        f"axsparse: error: run_dir (--set): {tmp_path}/1/runs/x is not the directory "
        f"{tmp_path}/0/runs/x of rank 0; name one by its absolute path, on a disk that all hosts "
        "share"
    )
    words = [str(program), *SMALL, "--steps", "1", "--run-dir", "runs/x"]

    for more in ([], ["--resume", "auto"]):
        done = run_mpirun(2, [*words, *more], cwd=tmp_path)

        assert done.returncode == 74, str(done)
        assert done.errors == [said]
        (tmp_path / "1" / "runs" / "x").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_after_the_run_changes_its_code_no_more(name: str, tmp_path: Path) -> None:
    """As that of a job script whose time is over at this moment."""
    program = (
        "import atexit, os, signal\n"
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{name}))\n"
        "from axsparse.train import main\n"
        "main()\n"
    )
    words = [warm_python(), "-c", program, *SMALL, *ONE_STAGE, "--steps", "1"]

    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.exhaustive
def test_ranks_that_only_train_load_no_compiler_and_no_algebra(tmp_path: Path) -> None:
    """A second and 80 MB. The first rank has torch find what layers cost, which takes both."""
    done = run_mpirun(
        2, ["-c", LOADED, *SMALL, "--steps", "1"], cwd=tmp_path, python=sys.executable
    )

    assert done.returncode == 0, str(done)
    # A file for each rank, since lines of several ranks may be joined on the way to the screen.
    loaded = {path.name: path.read_text() for path in tmp_path.glob("loaded-*")}
    assert loaded.keys() == {"loaded-0", "loaded-1"}
    assert loaded["loaded-1"] == ""


def test_pruning_on_the_way_drops_the_state_from_the_dense_formula_to_samos(train: Train) -> None:
    run = train(2, *ONE_STAGE, "--set", "pruning.at_step=2")
    start, dense = (
        records_of(train(2, *ONE_STAGE, *how).folder)[0]["model_state_bytes"] for how in ((), DENSE)
    )

    states = [record["model_state_bytes"] for record in records_of(run.folder, "loss")]
    assert states == [dense, dense, start]
    [change] = records_of(run.folder, "masks")
    assert change == {
        "step": 2,
        "masks": "pruned",
        "sparsity": pytest.approx(0.9, abs=1e-4),
        "model_state_bytes_before": dense,
        "model_state_bytes": start,
    }
    assert "step 2/3  pruned  sparsity 90 %  model state/rank " in run.screen


FULL = (
    "axsparse: warning: stdout: lines could not be written (No space left on device); "
    "metrics.jsonl of the run has all figures\n"
)


@pytest.mark.parametrize(
    ("screen", "said"),
    by_default(
        [("| head -n 1", ""), (">/dev/full", FULL)],
        [("| head -n 1", ""), (">&-", ""), (">/dev/full", FULL)],
    ),
)
def test_a_screen_that_is_lost_ends_no_run(screen: str, said: str, tmp_path: Path) -> None:
    command = [warm_python(), "-m", "axsparse.train", *SMALL, *ONE_STAGE, "--steps", "2"]
    command += ["--run-dir", "run"]
    # PIPESTATUS would be bash's; a file tells the code of a command before a pipe as well.
    script = f"({shlex.join(command)}; echo $? > code) {screen}"

    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )

    assert (tmp_path / "code").read_text() == "0\n"
    assert done.stderr == said
    assert len(records_of(tmp_path / "run")) == 3
