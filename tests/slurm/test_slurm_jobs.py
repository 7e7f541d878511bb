"""Jobs of `axsparse submit --slurm` under a real SLURM: `make test-slurm`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm.loopback import Cluster, exit_codes, loopback, wait_for_end, wait_until
from support import standin_trainer
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
"""Of training, in all: more than a start of a minute, warned 45 s before its end, has."""
LAUNCHERS = {"mpirun": (), "srun": ("--launcher", "srun", "--mpi", "pmi2")}
END_SECONDS = 900
"""On a busy machine starting takes most of a start of a minute."""


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
    python = standin_trainer.install_with_mpirun(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(python))
    return folder


def run(*arguments: str, capfd: pytest.CaptureFixture[str], **environment: str) -> str:
    """Submit a job and wait for its end; its number."""
    job = submit("--ranks", str(RANKS), *arguments, capfd=capfd, **environment)
    wait_for_end(job, END_SECONDS)
    return job


def submit(*arguments: str, capfd: pytest.CaptureFixture[str], **environment: str) -> str:
    """Submit a job; its number."""
    words = ["--slurm", "--config", "quickstart.yaml", "--run-dir", "r"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main(["submit", *words, *arguments])
    said = capfd.readouterr()
    assert not left.value.code, said.err
    return str(said.out.split()[3])


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
def test_training_saves_before_its_limit_and_goes_on_as_if_nothing_had_happened(
    launcher: str,
    here: Path,
    uninterrupted: list[tuple[int, float]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    (here / "tiny.yaml").write_text(TINY)
    limit = ("--time", "0:01:00", "--margin", "0:00:45")
    what = ("--config", "tiny.yaml", "--steps", str(len(uninterrupted)))

    job = run(*limit, *LAUNCHERS[launcher], *what, capfd=capfd)

    log = Path(f"r/job-{job}.log").read_text()
    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log
    assert "goes on from r/checkpoints/step-" in log
    assert losses(Path("r")) == uninterrupted


@pytest.mark.parametrize(("launcher", "code"), [("mpirun", "9:0"), ("srun", "137:0")])
def test_a_killed_rank_ends_the_job_and_the_next_goes_on(
    launcher: str, code: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--time", "0:05:00", "--margin", "0:01:00", *LAUNCHERS[launcher])

    options += ("--restarts", "0")
    first = run(*options, capfd=capfd, STANDIN_KILL_AT="5")
    second = run(*options, capfd=capfd, STANDIN_KILL_AT="5")

    assert exit_codes(first) == {first: f"FAILED {code}"}
    assert exit_codes(second) == {second: "COMPLETED 0:0"}
    assert begins(RANKS - 1) == [0, 4]
    assert steps(RANKS - 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_chain_goes_on_until_it_is_done_and_drops_the_rest(
    launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = run(
        *("--time", "0:05:00", "--margin", "0:01:00", "--chain", "5", *LAUNCHERS[launcher]),
        *("--restarts", "0"),
        capfd=capfd,
        STANDIN_KILL_AT="5",
    )

    parts = exit_codes(job)
    assert parts["1"].startswith("FAILED ") and parts["2"] == "COMPLETED 0:0"
    assert {value.split()[0] for part, value in parts.items() if part not in "12"} == {"CANCELLED"}
    assert begins(RANKS - 1) == [0, 4]
    assert sorted(path.name for path in Path("r").glob("*.log")) == [
        f"job-{job}_1.log",
        f"job-{job}_2.log",
    ]


def test_without_a_pmi_that_the_ranks_know_training_refuses_to_start_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    options = ("--launcher", "srun", "--mpi", "none", "--set", "run_dir=r")

    job = run("--time", "0:05:00", "--margin", "0:01:00", *options, capfd=capfd)

    [line] = [
        line
        for line in Path(f"r/job-{job}.log").read_text().splitlines()
        if line.startswith("axsparse: error: ")
    ]
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
        *("--nodes", "3", "--ranks", "6", "--time", "0:30:00", "--restarts", "6", *what),
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

    log = Path(f"r/job-{job}.log").read_text()
    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log
    assert hosts_of_attempts() == [{"node1": 2, "node2": 2, "node3": 2}] + 2 * [
        {"node1": 2, "node3": 2}
    ], log
    alone = ["-m", "axsparse.train", *what, "--set", "batch.global_batch_size=24"]
    done = run_mpirun(1, [*alone, "--run-dir", "alone"], cwd=here, timeout=END_SECONDS)
    assert done.returncode == 0, str(done)
    assert losses(Path("r")) == losses(Path("alone"))


def test_srun_starts_ranks_on_the_nodes_that_are_left(
    slurm: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    job = submit(
        *("--nodes", "3", "--ranks", "6", "--time", "0:30:00", "--restarts", "6"),
        *LAUNCHERS["srun"],
        capfd=capfd,
        STANDIN_STEPS="80",
        STANDIN_STEP_SECONDS="0.5",
    )
    wait_until(lambda: Path("r/rank-5.jsonl").exists() and len(steps(5)) > 3, "ranks to begin")

    slurm.kill("node2")
    wait_for_end(job, END_SECONDS)
    slurm.start("node2")

    log = Path(f"r/job-{job}.log").read_text()
    assert exit_codes(job) == {job: "COMPLETED 0:0"}, log
    first, second = hosts_of_attempts()
    assert first == {"node1": 2, "node2": 2, "node3": 2}, log
    assert second == {"node1": 2, "node3": 2}, log
    assert steps(3)[-1] == 80


def trained(steps: int) -> None:
    """Wait until the job has made so many steps, of which some may be made anew."""
    record = Path("r/metrics.jsonl")
    wait_until(lambda: record.exists() and len(metrics(Path("r"))) >= steps, f"{steps} steps")


def hosts_of_attempts() -> list[dict[str, int]]:
    lines = Path("r/restarts.jsonl").read_text().splitlines()
    return [json.loads(line)["hosts"] for line in lines]
