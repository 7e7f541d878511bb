"""Jobs of `axsparse submit --slurm` under a real SLURM: `make test-slurm`."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm import standin_trainer
from slurm.loopback import Cluster, exit_codes, loopback, wait_for_end, wait_until
from support.mpirun import run_mpirun

from axsparse.__main__ import main

PYTHON = sys.executable
RANKS = 2
TINY = """\
model: {num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 32}
batch: {global_batch_size: 8, microbatch_size: 2}
train: {steps: 100, eval_every: 0, eval_steps: 0, peak_flops: 1.0e+9, log_every: 100}
checkpoint: {every: 500}
"""
RUN_SECONDS = 40
"""Of training, in all."""
LAUNCHERS: dict[str, tuple[tuple[str, str], ...]] = {
    "mpirun": (),
    "srun": (("\nstart()", "\n# start()"), ("\n# start() { exec srun", "\nstart() { exec srun")),
}
"""How a script is edited so that another launcher starts its ranks."""
END_SECONDS = 900
"""On a busy machine starting takes a minute."""


@pytest.fixture(scope="session", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with loopback(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # What most jobs run: it can be told to fail, and starts at once.
    python = standin_trainer.install(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(python))
    return folder


def submit(
    *arguments: str,
    capfd: pytest.CaptureFixture[str],
    edit: tuple[tuple[str, str], ...] = (),
    **environment: str,
) -> str:
    """Fill in a job's script, edit it as a user may, and submit it; its number."""
    words = ["--slurm", "--config", "quickstart.yaml", "--run-dir", "r"]
    with pytest.raises(SystemExit) as left:
        main(["submit", *words, *arguments])
    said = capfd.readouterr()
    assert not left.value.code, said.err
    script = said.out
    for before, after in (*edit, ("pause=30", "pause=1"), ("--output=%x-", "--output=job-")):
        assert before in script
        script = script.replace(before, after)
    Path("r.sh").write_text(script)
    done = subprocess.run(
        ["sbatch", "r.sh"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[3]


def log(job: str) -> str:
    return Path(f"job-{job}.log").read_text()


def begins(rank: int) -> list[int]:
    """After which step each start of a rank began."""
    return [line["begin"] for line in history(rank) if isinstance(line, dict)]


def history(rank: int) -> list[Any]:
    return [json.loads(line) for line in Path(f"r/rank-{rank}.jsonl").read_text().splitlines()]


def steps(rank: int) -> list[int]:
    return [line for line in history(rank) if isinstance(line, int)]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in metrics(run_dir)]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of steps."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Losses of a run outside SLURM, of as many steps as this machine makes in RUN_SECONDS."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "tiny.yaml").write_text(TINY)

    def train(*arguments: str) -> Path:
        run_dir = folder / f"r{len(arguments)}"
        command = ["-m", "axsparse.train", "--config", "tiny.yaml", "--run-dir", str(run_dir)]
        done = run_mpirun(RANKS, [*command, *arguments], cwd=folder, timeout=END_SECONDS)
        assert done.returncode == 0, str(done)
        return run_dir

    times = [record["step_seconds"] for record in metrics(train())]
    return losses(train("--steps", str(round(RUN_SECONDS / statistics.median(times)))))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_that_is_told_saves_and_goes_on_as_if_nothing_had_happened(
    launcher: str,
    here: Path,
    uninterrupted: list[tuple[int, float]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    (here / "tiny.yaml").write_text(TINY)
    what = ("--config", "tiny.yaml", "--steps", str(len(uninterrupted)))

    job = submit(
        *("--ranks", str(RANKS), "--time", "0:30:00", *what),
        capfd=capfd,
        edit=LAUNCHERS[launcher],
    )
    trained(10)
    # As SLURM itself does before the end of the time.
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait_for_end(job, END_SECONDS)
    following = str(int(job) + 1)
    wait_for_end(following, END_SECONDS)

    assert exit_codes(job) == {job: "FAILED 75:0"}, log(job)
    assert exit_codes(following) == {following: "COMPLETED 0:0"}, log(following)
    assert "goes on from " in log(following)
    assert losses(Path("r")) == uninterrupted


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_slurm_tells_a_job_before_its_time_ends(
    launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = submit(
        *("--ranks", str(RANKS), "--time", "0:02:00", "--margin", "0:00:30"),
        capfd=capfd,
        edit=(*LAUNCHERS[launcher], ("save_at=90 ", "save_at=9999 ")),
        STANDIN_WARN_AT="3",
    )
    wait_for_end(job, END_SECONDS)
    following = str(int(job) + 1)
    wait_for_end(following, END_SECONDS)

    assert exit_codes(job) == {job: "FAILED 75:0"}, log(job)
    assert exit_codes(following) == {following: "COMPLETED 0:0"}, log(following)
    assert begins(RANKS - 1) == [0, 3]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_started_again(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    job = submit(
        *("--ranks", str(RANKS), "--time", "0:05:00", "--margin", "0:01:00"),
        capfd=capfd,
        edit=LAUNCHERS[launcher],
        STANDIN_KILL_AT="5",
    )
    wait_for_end(job, END_SECONDS)

    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log(job)
    assert begins(RANKS - 1) == [0, 4]
    assert steps(RANKS - 1) == [1, 2, 3, 4, 5, 5, 6]


def test_without_a_pmi_that_the_ranks_know_training_refuses_to_start_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    none = ("--mpi=pmi2", "--mpi=none")

    job = submit(
        *("--ranks", str(RANKS), "--time", "0:05:00", "--margin", "0:01:00"),
        capfd=capfd,
        edit=(*LAUNCHERS["srun"], none),
    )
    wait_for_end(job, END_SECONDS)

    [line] = [line for line in log(job).splitlines() if line.startswith("axsparse: error: ")]
    assert line.startswith("axsparse: error: MPI: size 1, but SLURM_STEP_NUM_TASKS is 2: ")
    assert exit_codes(job) == {job: "FAILED 78:0"}


def test_a_job_whose_node_dies_goes_on_with_the_others_and_ends_in_the_same_bits(
    here: Path,
    slurm: Cluster,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    (here / "tiny.yaml").write_text(TINY + "samo: {gradient: exact}\nprecision: fp32\n")
    what = ("--config", "tiny.yaml", "--steps", "300", "--set", "checkpoint.every=10")
    job = submit(
        *("--nodes", "3", "--ranks", "6", "--time", "0:30:00", *what),
        *("--set", "batch.global_batch_size=24"),
        capfd=capfd,
    )

    trained(20)
    slurm.kill("node2")
    trained(len(metrics(Path("r"))) + 20)
    # It is a node of the cluster again, and none of the job.
    slurm.start("node2")
    slurm.kill_rank("node3", "axsparse.train")
    wait_for_end(job, END_SECONDS)

    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log(job)
    assert attempts(job) == ["6 ranks on 3 of 3 nodes"] + 2 * ["4 ranks on 2 of 3 nodes"]
    alone = ["-m", "axsparse.train", *what, "--set", "batch.global_batch_size=24"]
    done = run_mpirun(1, [*alone, "--run-dir", "alone"], cwd=here, timeout=END_SECONDS)
    assert done.returncode == 0, str(done)
    assert losses(Path("r")) == losses(Path("alone"))


def test_srun_starts_ranks_on_the_nodes_that_are_left(
    slurm: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    job = submit(
        *("--nodes", "3", "--ranks", "6", "--time", "0:30:00"),
        capfd=capfd,
        edit=LAUNCHERS["srun"],
        STANDIN_STEPS="80",
        STANDIN_STEP_SECONDS="0.5",
    )
    wait_until(lambda: Path("r/rank-5.jsonl").exists() and len(steps(5)) > 3, "ranks to begin")

    slurm.kill("node2")
    wait_for_end(job, END_SECONDS)
    slurm.start("node2")

    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log(job)
    assert attempts(job) == ["6 ranks on 3 of 3 nodes", "4 ranks on 2 of 3 nodes"]
    assert steps(3)[-1] == 80


def trained(steps: int) -> None:
    """Wait until the job has made so many steps, of which some may be made anew."""
    record = Path("r/metrics.jsonl")
    wait_until(lambda: record.exists() and len(metrics(Path("r"))) >= steps, f"{steps} steps")


def attempts(job: str) -> list[str]:
    """The starts of a job's ranks, by the lines of its script."""
    return re.findall(r"^axsparse: (\d+ ranks on \d+ of \d+ nodes)$", log(job), re.MULTILINE)
