"""`axsparse submit`: what it refuses, what it writes, and that the jobs it submits end well.

The schedulers are stand-ins that really run the job (`support/standin_cluster.py`); the
training is one that counts steps (`support/standin_trainer.py`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import standin_trainer
from support.directives import assert_a_shell_reads, read_lsf, read_slurm
from support.mpirun import KILLED, LONGEST_SECONDS
from support.standin_cluster import install, starts

from axsparse.cli import submit
from axsparse.cli.parser import overrides_of
from axsparse.config.load import load_config

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
            "argument --account: 'a\\n#SBATCH --uid=0' is no name; use letters, digits and _ . @ : "
            "/ + -, beginning with a letter or digit; see --help",
        ),
        *(
            ([*SLURM, "--set", value], 78, " holds a line break or another control character; ")
            for value in ("data.path=a\n#SBATCH --uid=0", "run_dir=a\rb", "data.path=a\u2028b")
        ),
        (
            [*SLURM, "--run-dir", "100%"],
            78,
            "100%' holds one of \" $ % ' \\ `, which schedulers replace in the name of the log; "
            "choose another --run-dir",
        ),
        *(
            ([*SLURM, "--time", time], 78, f"argument --time: {time!r} is no time; write H:MM:SS")
            for time in ("2:00", "120", "", "0:00:00", "1:60:00", "$x:00:00", "²:00:00")
        ),
        *(
            ([*SLURM, "--nodes", number], 78, f"{number[:60]!r} is no whole number from 1 to 1000")
            for number in ("0", "1.5", "", "1e3", "٣", "10000001", "9" * 99)
        ),
        *(
            ([*SLURM, "--queue", queue], 78, "is no name; use letters, digits and")
            for queue in ("", "a b", "$HOME", "`id`", 'a"b', "é", "a" * 201)
        ),
        *(
            ([*SLURM, f"--directive={text}"], 78, "is no option of a scheduler; write it as in a ")
            for text in ("--comment=a\n#SBATCH --uid=0", "constraint=gpu", "--comment='a", "")
        ),
        ([*SLURM, "--directive=--comment=$HOME"], 78, "which no scheduler replaces there; write"),
        (
            [*SLURM, "--ranks", "7", "--nodes", "2"],
            78,
            "--ranks: 7 does not spread evenly over 2 nodes; choose 6 or 8",
        ),
        (
            [*SLURM, "--ranks", "3", "--nodes", "4"],
            78,
            "--ranks: 3 does not spread evenly over 4 nodes; choose 4",
        ),
        (
            [*SLURM, "--margin", "1:00:00"],
            78,
            "--margin: 1:00:00 before the end of a job of 1:00:00 is before its start; choose a "
            "shorter one, or a longer --time",
        ),
        (
            [*SLURM, "--mpi", "pmi2"],
            78,
            "--mpi: pmi2 is for srun, and the launcher is mpirun; leave it out, or choose "
            "--launcher srun",
        ),
        *(
            (
                [*SLURM, "--copy-environment", place],
                78,
                f"--copy-environment: '{place}' is no folder on each node; name one from the root "
                "on, such as /tmp",
            )
            for place in ("tmp", "/")
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


# --- the text of the script --------------------------------------------------------------

EIGHT = ("--nodes", "2", "--ranks", "8", "--gpus-per-node", "4", "--time", "2:00:00")
NAMED = ("--account", "abc123", "--queue", "batch", "--job-name", "gpt", "--run-dir", "/s/gpt")


def script_of(*words: str) -> str:
    """The script of a command line for eight ranks on two nodes."""
    job = submit.parser().parse_args([*EIGHT, *NAMED, *words])
    job.pairs = overrides_of(job)
    submit.complete(job, load_config(job.config, job.pairs))
    return submit.script(job).decode()


def line_of(script: str, first_word: str) -> str:
    """The only line that begins so."""
    [line] = [line for line in script.splitlines() if line.startswith(first_word)]
    return line


def test_the_directives_of_slurm_say_what_the_job_asks_for() -> None:
    assert read_slurm(script_of("--slurm")) == {
        "--job-name": "gpt",
        "--nodes": "2",
        "--ntasks": "8",
        "--ntasks-per-node": "4",
        "--distribution": "block",
        "--cpus-per-task": "7",
        "--gpus-per-node": "4",
        "--time": "2:00:00",
        "--signal": "B:USR1@300",
        "--requeue": "",
        "--open-mode": "append",
        "--output": "/s/gpt/job-%j.log",
        "--account": "abc123",
        "--partition": "batch",
    }


def test_the_directives_of_lsf_say_what_the_job_asks_for() -> None:
    assert read_lsf(script_of("--lsf")) == {
        "-J": "gpt",
        "-nnodes": "2",
        "-W": "2:00",
        "-wa": "USR1",
        "-wt": "5",
        "-r": "",
        "-Q": "75",
        "-o": "/s/gpt/job-%J.log",
        "-P": "abc123",
        "-q": "batch",
    }


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--lsf", "--time", "1:00:01", "--margin", "0:01:01"], {"-W": "1:01", "-wt": "2"}),
        (
            ["--lsf", "--launcher", "mpirun", "--directive=-x"],
            {"-n": "8", "-R": "span[ptile=4]", "-gpu": "num=4", "-x": "", "-nnodes": None},
        ),
        (
            ["--lsf", "--chain", "3"],
            {"-J": "gpt[1-3]%1", "-o": "/s/gpt/job-%J_%I.log", "-Q": None, "-r": None},
        ),
        (["--slurm", "--chain", "3"], {"--array": "1-3%1", "--output": "/s/gpt/job-%A_%a.log"}),
        (["--slurm", "--run-dir", "/s/my runs/é"], {"--output": "/s/my runs/é/job-%j.log"}),
        (["--slurm", "--gpus-per-node", "0"], {"--gpus-per-node": None, "--array": None}),
        (["--slurm", "--time", "2-00:00:00"], {"--time": "48:00:00"}),
        (
            ["--slurm", "--directive=--constraint=gpu", '--directive=--comment="a b"'],
            {"--constraint": "gpu", "--comment": "a b"},
        ),
    ],
    ids=" ".join,
)
def test_directives_follow_the_options(words: list[str], options: dict[str, str | None]) -> None:
    read = read_lsf if "--lsf" in words else read_slurm

    found = read(script_of(*words))

    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--slurm"], "-n 8"),
        (
            ["--slurm", "--launcher", "srun"],
            'srun -K1 --ntasks=8 --cpus-per-task=7 sh -c "$rank" "$left"',
        ),
        (
            ["--slurm", "--launcher", "srun", "--mpi", "pmi2"],
            'srun -K1 --mpi=pmi2 --ntasks=8 --cpus-per-task=7 sh -c "$rank" "$left"',
        ),
        (["--lsf"], "jsrun -n 8 -a1 -g1 -c7"),
        (["--lsf", "--gpus-per-node", "0"], "jsrun -n 8 -a1 -g0 -c1"),
        (["--lsf", "--launcher", "mpirun"], "-n 8"),
    ],
    ids=str,
)
def test_ranks_are_started_by_the_launcher(words: list[str], command: str) -> None:
    [line] = [line for line in script_of(*words).splitlines() if line.endswith("=auto &")]

    assert f'{command} "$python" -m axsparse.train --set=run_dir=/s/gpt --resume=auto &' in line


@pytest.mark.parametrize(
    "words",
    [
        ["--slurm"],
        ["--slurm", "--chain", "4"],
        ["--slurm", "--launcher", "srun", "--mpi", "pmix", "--set", HARD],
        ["--slurm", "--setup", "it's here.sh", "--copy-environment", "/local disk"],
        ["--lsf"],
        ["--lsf", "--chain", "4"],
        ["--lsf", "--launcher", "mpirun"],
        ["--lsf", "--setup", "it's here.sh", "--copy-environment", "/local disk"],
    ],
    ids=" ".join,
)
def test_shells_can_read_the_script(here: Path, words: list[str], environment: Path) -> None:
    (here / "it's here.sh").touch()
    assert_a_shell_reads(script_of(*words))


def test_no_placeholder_is_left_and_none_of_a_users_is_filled_in() -> None:
    script = script_of("--slurm", "--set", "data.path=x@ranks@")

    assert re.findall(r"@[a-z_]+@", script) == ["@ranks@"]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*SLURM, "--copy-environment", "/local"],
            "is not of a venv or conda environment that could be copied; install axsparse into "
            "one, or leave the option out",
        ),
        (
            [*LSF, "--copy-environment", "/local", "--launcher", "mpirun"],
            "--copy-environment: mpirun cannot start one process on each node under LSF; choose "
            "--launcher jsrun, or leave the option out",
        ),
    ],
)
def test_an_environment_that_cannot_be_copied_is_refused(
    here: Path,
    environment: Path,
    words: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "--slurm" in words:
        (environment / "pyvenv.cfg").unlink()

    assert run(*words) == 78

    assert message in capfd.readouterr().err


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
        "import sys; from axsparse.cli import submit\n"
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
