"""`axsparse submit`: what it refuses, what it writes, and that the jobs it submits end well.

The schedulers are stand-ins that really run the job (`support/standin_cluster.py`); the
training is one that counts steps (`support/standin_trainer.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import standin_trainer
from support.directives import read_lsf, read_slurm
from support.mpirun import KILLED, LONGEST_SECONDS
from support.standin_cluster import install, starts

from axsparse.cli.submit import submit

TRAINER = (str(Path(standin_trainer.__file__).resolve()),)
SLURM = ("--slurm", "--ranks", "2", "--time", "1:00:00", "--config", "quickstart.yaml")
SRUN = (*SLURM, "--launcher", "srun")
LSF = ("--lsf", "--ranks", "2", "--time", "1:00:00", "--config", "quickstart.yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with stand-in schedulers on PATH and a stand-in for training."""
    folder = tmp_path / "my é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    commands = install(tmp_path / "commands")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(submit, "TRAIN", TRAINER)
    for name in ("PMI_RANK", "SLURM_PROCID", "AXSPARSE_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def run(*arguments: str) -> int:
    """Submit in this process; the exit code."""
    with pytest.raises(SystemExit) as left:
        submit.main(arguments)
    return int(left.value.code or 0)


def commands(here: Path) -> Path:
    return here.parent / "commands"


def history(run_dir: Path, rank: int) -> list[Any]:
    """What a rank of the stand-in left: an object a start, then its steps."""
    lines = (run_dir / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def begins(run_dir: Path, rank: int) -> list[int]:
    """After which step each start of a rank began."""
    return [line["begin"] for line in history(run_dir, rank) if isinstance(line, dict)]


def steps(run_dir: Path, rank: int) -> list[int]:
    return [line for line in history(run_dir, rank) if isinstance(line, int)]


# --- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--slurm", "--time", "1:00:00"],
            78,
            "--ranks: not given, nor --gpus-per-node; say how many ranks to start",
        ),
        (
            ["--slurm", "--ranks", "2", "--time", "1:00:00"],
            78,
            "submit: nothing says what to train; name a configuration, such as "
            "--config quickstart.yaml",
        ),
        (
            [*SLURM, "--set", "layout.g_inter=3"],
            78,
            "layout.g_inter (--set): 3 does not divide the 2 ranks; start 3 ranks or choose one "
            "of 1, 2",
        ),
        (
            [*SLURM, "--set", "layout.g_inter=1", "--set", "batch.global_batch_size=9"],
            78,
            "batch.global_batch_size (--set): 9 does not divide evenly over 2 replicas (9 = 2 "
            "replicas × 4 + 1); choose 8 or 10, or as layout.g_data one of 1, 3, 9",
        ),
        (
            [*SLURM, "--set", "pruning.spasity=0.5"],
            78,
            "pruning.spasity (--set): unknown key; did you mean pruning.sparsity?",
        ),
        (
            [*SLURM, "--set", "train.threads=4"],
            78,
            "--cpus-per-rank: 1 is below train.threads 4; choose at least 4",
        ),
        (
            [*SLURM, "--launcher", "jsrun"],
            78,
            "--launcher: 'jsrun' does not start ranks under this scheduler; choose mpirun or srun",
        ),
        (
            [*LSF, "--launcher", "srun"],
            78,
            "--launcher: 'srun' does not start ranks under this scheduler; choose jsrun or mpirun",
        ),
        (
            [*LSF, "--gpus-per-node", "1"],
            78,
            "--gpus-per-node: 1 for 2 ranks a node, but jsrun gives each rank one; choose 2, or "
            "--launcher mpirun",
        ),
        (
            [*SLURM, "--account", "a\n#SBATCH --uid=0"],
            78,
            "--account: 'a\\n#SBATCH --uid=0' is no name; use letters, digits and _ . @ : / + -, "
            "beginning with a letter or digit",
        ),
        (
            [*SLURM, "--set", "data.path=a\n#SBATCH --uid=0"],
            78,
            "--config, --set: '--set=data.path=a\\n#SBATCH --uid=0' holds a line break or another "
            "control character; remove it",
        ),
        ([*SLURM, "--config", "quick.yaml"], 66, "config 'quick.yaml': no such file and no"),
        ([*SLURM, "--setup", "no.sh"], 66, "is no file; name an existing one"),
        ([*SLURM, "--lsf"], 78, "argument --lsf: not allowed with argument --slurm; see --help"),
        (["--slurm", "--ranks", "2"], 78, "the following arguments are required: --time"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(
    here: Path,
    arguments: list[str],
    code: int,
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments) == code

    said = capfd.readouterr()
    assert said.err.startswith("axsparse: error: ") and message in said.err
    assert said.err.count("\n") == 1 and said.out == ""
    assert list(here.iterdir()) == [] and starts(commands(here)) == []


def test_without_the_scheduler_nothing_is_left_behind(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))

    assert run(*SLURM) == 66

    assert capfd.readouterr().err == (
        "axsparse: error: sbatch: no such command; submit from a login node of the cluster, or "
        "print the script with --dry-run\n"
    )
    assert not (here / "runs" / "quickstart").exists()


def test_what_the_scheduler_refuses_is_told_in_its_words(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refusing = commands(here) / "sbatch"
    refusing.write_text("#!/bin/sh\necho 'sbatch: error: Invalid\n  account' >&2\nexit 1\n")

    assert run(*SLURM) == 78

    assert capfd.readouterr().err == (
        "axsparse: error: sbatch: refuses the job: sbatch: error: Invalid account; change what it "
        "names, see axsparse submit --help\n"
    )
    assert not (here / "runs" / "quickstart").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "cannot be made (File exists); choose another --run-dir"),
        ("file/below/it", "cannot be made (Not a directory); choose another --run-dir"),
    ],
)
def test_a_run_directory_that_cannot_be_made_is_refused(
    here: Path, name: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()

    assert run(*SLURM, "--run-dir", name) == 74

    assert capfd.readouterr().err == f"axsparse: error: run_dir: {here / name} {message}\n"


# --- what is written ---------------------------------------------------------------------


def test_a_dry_run_prints_the_script_and_writes_nothing(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*SLURM, "--gpus-per-node", "2", "--partition", "gpu", "--dry-run") == 0

    options = read_slurm(capfd.readouterr().out)
    assert (options["--ntasks"], options["--gpus-per-node"]) == ("2", "2")
    assert (options["--partition"], options["--job-name"]) == ("gpu", "quickstart")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "cores"),
    [
        (["--ranks", "2"], "1"),
        (["--gpus-per-node", "2"], "7"),
        (["--gpus-per-node", "2", "--ranks", "1"], "14"),
        (["--gpus-per-node", "1", "--ranks", "2"], "3"),
        (["--gpus-per-node", "2", "--set", "train.threads=9"], "9"),
        (["--gpus-per-node", "2", "--cpus-per-rank", "1"], "1"),
    ],
)
def test_a_rank_with_a_gpu_gets_cores_for_all_that_feeds_it(
    arguments: list[str], cores: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python, the threads that fetch batches, those of NCCL and of torch would share one core."""
    start = ["--slurm", "--time", "1:00:00", "--config", "quickstart.yaml", "--dry-run"]

    assert run(*start, *arguments) == 0

    assert read_slurm(capfd.readouterr().out)["--cpus-per-task"] == cores


def test_a_job_gets_a_new_folder_unless_one_is_named(here: Path) -> None:
    assert [run(*SRUN), run(*SRUN), run(*SRUN, "--run-dir", "mine")] == [0, 0, 0]
    assert run(*SRUN, "--set", "run_dir=mine") == 0

    assert sorted(path.name for path in (here / "runs").iterdir()) == ["quickstart", "quickstart-2"]
    assert begins(here / "runs" / "quickstart-2", 0) == [0]
    assert begins(here / "mine", 0) == [0, 6]
    assert (here / "runs" / "quickstart").stat().st_mode & 0o777 == 0o700
    assert (here / "runs" / "quickstart" / "job.sh").is_file()


def test_the_screen_says_what_was_submitted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SRUN, "--chain", "2") == 0

    assert capfd.readouterr().out.splitlines() == [
        "Submitted batch job 41",
        f"2 ranks on 1 node · 1:00:00 at a time · up to 2 jobs · log → {here}/runs/quickstart/"
        "job-*.log",
    ]


HARD = "data.path=a  b/$HOME/`id`/'\"/*/é/\\n/@ranks@/!x"


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_values_arrive_at_the_ranks_as_they_were_given(
    here: Path, scheduler: tuple[str, ...]
) -> None:
    (here / "my conf").mkdir()
    (here / "my conf" / "-é $x.yaml").write_text("seed: 5\n")
    config = str(here / "my conf" / "-é $x.yaml")
    options = ["--config", config, "--set", HARD, "--steps", "6", "--run-dir", "my run"]

    assert run(*scheduler, *options) == 0

    first = history(here / "my run", 1)[0]
    assert first["arguments"] == [
        *(f"--config={config}", f"--set={HARD}", "--set=train.steps=6", "--set=run_dir=my run"),
        "--resume=auto",
    ]
    assert first["folder"] == str(here)
    assert first["ranks"] == "2"


def test_a_path_of_any_bytes_is_handed_on(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xc3\xa9.yaml")).touch()
    command = [sys.executable, "-m", "axsparse", "submit", *SLURM, "--dry-run"]

    said = subprocess.run(
        [*command, b"--config=\xff\xc3\xa9.yaml"],
        capture_output=True,
        check=True,
        timeout=LONGEST_SECONDS,
        cwd=tmp_path,
    )

    assert b"'--config=\xff\xc3\xa9.yaml'" in said.stdout


def test_the_job_is_called_like_the_configuration(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "-my é.yaml").touch()

    assert run(*SLURM, "--dry-run", "--config=-my é.yaml") == 0

    assert read_slurm(capfd.readouterr().out)["--job-name"] == "my__"


def test_a_file_of_the_sites_is_read_first(here: Path) -> None:
    (here / "my modules.sh").write_text("export STANDIN_STEPS=3\n")

    assert run(*SRUN, "--setup", "my modules.sh", "--run-dir", "r") == 0

    assert steps(here / "r", 0) == [1, 2, 3]


# --- jobs, from start to end -------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [SLURM, SRUN, LSF], ids=["mpirun", "srun", "jsrun"])
def test_a_job_that_runs_out_of_time_saves_and_goes_on(
    here: Path, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")

    assert run(*scheduler, "--run-dir", "r") == 0

    # Requeueing kills the shell of a SLURM job; LSF looks at the code.
    assert starts(commands(here)) == [75 if "--lsf" in scheduler else -9, 0]
    for rank in (0, 1):
        assert begins(here / "r", rank) == [0, 3]
        assert steps(here / "r", rank) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["srun", "jsrun"])
def test_a_code_that_bash_loses_to_the_warning_is_the_warnings(
    here: Path, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens to one in three where a signal comes as the ranks end."""
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_WARNED_CODE", "255")

    assert run(*scheduler, "--run-dir", "r") == 0

    assert starts(commands(here)) == [75 if "--lsf" in scheduler else -9, 0]


def test_a_job_that_is_done_ends(here: Path) -> None:
    assert run(*SRUN, "--run-dir", "r") == 0

    assert starts(commands(here)) == [0]
    assert begins(here / "r", 0) == [0]


@pytest.mark.parametrize("scheduler", [SLURM, SRUN, LSF], ids=["mpirun", "srun", "jsrun"])
def test_a_killed_rank_ends_the_job_with_the_launchers_code_and_the_next_goes_on(
    here: Path, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KILL_AT", "5")
    arguments = (*scheduler, "--run-dir", "r")

    assert [run(*arguments), run(*arguments)] == [0, 0]

    killed, done = starts(commands(here))
    assert (killed in KILLED, done) == (True, 0)
    assert begins(here / "r", 1) == [0, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_a_chain_goes_on_until_it_is_done_and_drops_the_rest(
    here: Path, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_KILL_AT", "5")

    assert run(*scheduler, "--run-dir", "r", "--chain", "5") == 0

    assert starts(commands(here)) == [75, 137, 0]
    assert begins(here / "r", 1) == [0, 3, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_a_chain_does_not_repeat_a_mistake(
    here: Path, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EXIT", "2:78")

    assert run(*scheduler, "--run-dir", "r", "--chain", "5") == 0

    assert starts(commands(here)) == [78]


def test_the_last_of_a_chain_has_no_rest_to_drop(here: Path) -> None:
    assert run(*LSF, "--run-dir", "r", "--chain", "1") == 0
    assert run(*LSF, "--run-dir", "r", "--chain", "2") == 0

    assert starts(commands(here)) == [0, 0]


def test_a_scheduler_that_does_not_requeue_is_reported(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    (commands(here) / "refuse-requeue").touch()

    assert run(*SRUN, "--run-dir", "r") == 0

    assert starts(commands(here)) == [75]
    assert (here / "r" / "job-41.log").read_text().splitlines()[-1] == (
        "axsparse: error: saved, but SLURM does not requeue job 41; submit it again"
    )


# --- a copy of the environment on each node ----------------------------------------------


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that submits."""
    path = tmp_path / "my env"
    (path / "bin").mkdir(parents=True)
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(path / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(path))
    return path


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_ranks_run_from_a_copy_of_the_environment_that_is_removed_afterwards(
    here: Path,
    scheduler: tuple[str, ...],
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    disk = tmp_path / "node's disk"
    (disk / "axsparse-41").mkdir(parents=True)  # of a start that was killed
    arguments = (*scheduler, "--run-dir", "r", "--copy-environment", str(disk))

    assert run(*arguments) == 0

    used = [line["executable"] for line in history(here / "r", 1) if isinstance(line, dict)]
    # A rank may be told to stop before it has written a line of its start.
    assert set(used) == {str(disk / "axsparse-41" / "bin" / "python")}
    assert list(disk.iterdir()) == []
    assert sorted(path.suffix for path in (here / "r").glob("[je]*")) == [".log", ".sh"]


def test_an_environment_that_cannot_be_copied_ends_the_job(
    here: Path, environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    assert run(*SRUN, "--run-dir", "r", "--copy-environment", str(tmp_path / "file")) == 0

    assert starts(commands(here)) == [74]
    assert (here / "r" / "job-41.log").read_text().splitlines()[-1] == (
        "axsparse: error: --copy-environment: the environment could not be copied to every node; "
        "choose another folder, or leave the option out"
    )
    assert not list((here / "r").glob("*.tar"))


# --- the command -------------------------------------------------------------------------


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = submit.DESCRIPTION.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("axsparse ")]

    assert len(lines) == 3
    for line in lines:
        submit.parser().parse_args(shlex.split(line)[2:])


def test_help_costs_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from axsparse.cli.submit import submit\n"
        "try: submit.main(['--help'])\n"
        "except SystemExit: print({'torch', 'mpi4py'} & set(sys.modules))"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "the scheduler starts it again until it is" in said.stdout
    assert said.stdout.splitlines()[-1] == "set()"


def test_one_of_many_ranks_submits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")

    assert run(*SLURM) == 0

    assert list(here.iterdir()) == []


def test_the_scripts_of_both_schedulers_can_be_printed(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*LSF, "--dry-run") == 0

    assert read_lsf(capfd.readouterr().out)["-W"] == "1:00"
