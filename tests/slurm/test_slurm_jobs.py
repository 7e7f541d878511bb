"""Jobs of `axsparse submit --slurm` under a real SLURM: `make test-slurm`."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.loopback import Cluster, exit_code, loopback, wait_for_end, wait_until
from support.mpirun import run_mpirun
from support.resuming import records_of

from axsparse.__main__ import main

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
    return folder


def submit(
    *arguments: str, capfd: pytest.CaptureFixture[str], edit: tuple[tuple[str, str], ...] = ()
) -> str:
    """Fill in a job's script, edit it as a user may, and submit it; its number."""
    config = () if "--config" in arguments else ("--config", "quickstart.yaml")
    words = ["--slurm", *config, "--run-dir", "r"]
    with pytest.raises(SystemExit) as left:
        main(["submit", *words, *arguments])
    said = capfd.readouterr()
    assert not left.value.code, said.err
    script = said.out
    for before, after in (*edit, ("pause=30", "pause=1"), ("--output=%x-", "--output=job-")):
        assert before in script
        script = script.replace(before, after)
    Path("r.sh").write_text(script)
    done = subprocess.run(["sbatch", "r.sh"], capture_output=True, text=True, check=True)
    return done.stdout.split()[3]


def log(job: str) -> str:
    return Path(f"job-{job}.log").read_text()


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records_of(run_dir, "loss")]


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

    times = [record["step_seconds"] for record in records_of(train(), "loss")]
    return losses(train("--steps", str(round(RUN_SECONDS / statistics.median(times)))))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_that_is_told_saves_and_goes_on_as_if_nothing_had_happened(
    launcher: str,
    here: Path,
    uninterrupted: list[tuple[int, float]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (here / "tiny.yaml").write_text(TINY)
    what = ("--config", "tiny.yaml", "--steps", str(len(uninterrupted)))

    job = submit(
        *("--ranks", str(RANKS), "--time", "0:30:00", *what), capfd=capfd, edit=LAUNCHERS[launcher]
    )
    trained(10)
    # As SLURM itself does before the end of the time.
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait_for_end(job, END_SECONDS)
    following = str(int(job) + 1)
    wait_for_end(following, END_SECONDS)

    assert exit_code(job) == "FAILED 75:0", log(job)
    assert exit_code(following) == "COMPLETED 0:0", log(following)
    assert "goes on from " in log(following)
    assert losses(Path("r")) == uninterrupted


def test_without_a_pmi_that_the_ranks_know_training_refuses_to_start_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    none = ("--mpi=pmi2", "--mpi=none")

    job = submit(
        *("--ranks", str(RANKS), "--time", "0:05:00", "--margin", "0:01:00"),
        capfd=capfd,
        edit=(*LAUNCHERS["srun"], none),
    )
    wait_for_end(job, END_SECONDS)

    [line] = [line for line in log(job).splitlines() if line.startswith("axsparse: error: ")]
    assert line.startswith("axsparse: error: MPI: size 1, but SLURM_STEP_NUM_TASKS is 2: ")
    assert exit_code(job) == "FAILED 78:0"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_whose_node_dies_goes_on_with_the_others_and_ends_in_the_same_bits(
    launcher: str, here: Path, slurm: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "tiny.yaml").write_text(TINY + "samo: {gradient: exact}\nprecision: fp32\n")
    what = ("--config", "tiny.yaml", "--steps", "300", "--set", "checkpoint.every=10")
    job = submit(
        *("--nodes", "3", "--ranks", "6", "--time", "0:30:00", *what),
        *("--set", "batch.global_batch_size=24"),
        capfd=capfd,
        edit=LAUNCHERS[launcher],
    )

    trained(20)
    slurm.kill("node2")
    trained(len(losses(Path("r"))) + 20)
    # It is a node of the cluster again, and none of the job.
    slurm.start("node2")
    slurm.kill_rank("node3", "axsparse.train")
    wait_for_end(job, END_SECONDS)

    assert exit_code(job) == "COMPLETED 0:0", log(job)
    assert attempts(job) == ["6 ranks on 3 of 3 nodes"] + 2 * ["4 ranks on 2 of 3 nodes"]
    alone = ["-m", "axsparse.train", *what, "--set", "batch.global_batch_size=24"]
    done = run_mpirun(1, [*alone, "--run-dir", "alone"], cwd=here, timeout=END_SECONDS)
    assert done.returncode == 0, str(done)
    assert losses(Path("r")) == losses(Path("alone"))


def trained(steps: int) -> None:
    """Wait until the job has made so many steps, of which some may be made anew."""
    record = Path("r/metrics.jsonl")
    wait_until(lambda: record.exists() and len(losses(Path("r"))) >= steps, f"{steps} steps")


def attempts(job: str) -> list[str]:
    """The starts of a job's ranks, by the lines of its script."""
    return re.findall(r"^axsparse: (\d+ ranks on \d+ of \d+ nodes)$", log(job), re.MULTILINE)
