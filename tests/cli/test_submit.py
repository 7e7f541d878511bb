"""`axsparse submit`: what it refuses, what it writes, and that the jobs it submits end well.

The schedulers are stand-ins that really run the job (`support/standin_cluster.py`); the
training is one that counts steps (`support/standin_trainer.py`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support import standin_trainer
from support.commands import Axsparse, assert_one_line
from support.directives import read_lsf, read_slurm
from support.exhaustive import by_default
from support.mpirun import KILLED, mpirun_path
from support.standin_cluster import install, starts

from axsparse.cli import submit as command
from axsparse.cli.parser import overrides_of
from axsparse.config.load import load_config

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
    monkeypatch.setattr(
        sys, "executable", str(standin_trainer.install_with_mpirun(tmp_path / "bin"))
    )
    for name in ("PMI_RANK", "SLURM_PROCID", "AXSPARSE_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def submit(axsparse: Axsparse) -> Axsparse:
    """`submit("--slurm", …)`: exit code, screen and errors."""
    return lambda *words: axsparse("submit", *words)


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

REFUSED = [
    ([*SLURM, "--set", "layout.g_inter=3"], "layout.g_inter (--set): 3 does not divide the 2 rank"),
    (
        [*SLURM, "--set", "layout.g_inter=1", "--set", "batch.global_batch_size=1"],
        "batch.global_batch_size (--set): 1 in microbatches of 2 makes 1 for 2 replicas",
    ),
    (
        [*SLURM, "--set", "pruning.spasity=0.5"],
        "pruning.spasity (--set): unknown key; did you mean pruning.sparsity?",
    ),
    (["--slurm", "--time", "1:00:00"], "--ranks: not given, nor --gpus-per-node; say how many"),
    (["--slurm", "--ranks", "2", "--time", "1:00:00"], "submit: nothing says what to train; name"),
    (["--slurm", "--ranks", "2"], "the following arguments are required: --time"),
    ([*SLURM, "--lsf"], "argument --lsf: not allowed with argument --slurm; see --help"),
    (
        [*SLURM, "--set", "train.threads=4"],
        "--cpus-per-rank: 1 is below train.threads 4; choose at least 4",
    ),
    (
        [*SLURM, "--launcher", "jsrun"],
        "--launcher: 'jsrun' does not start ranks under this scheduler; choose mpirun or srun",
    ),
    (
        [*LSF, "--gpus-per-node", "1"],
        "--gpus-per-node: 1 for 2 ranks a node, but jsrun gives each rank one; choose 2, or "
        "--launcher mpirun",
    ),
    (
        [*SLURM, "--account", "a\n#SBATCH --uid=0"],
        "argument --account: 'a\\n#SBATCH --uid=0' is no name; use letters, digits and _ . @ : "
        "/ + -, beginning with a letter or digit; see --help",
    ),
    *(
        ([*SLURM, "--set", value], " holds a line break or another control character; remove it")
        for value in ("data.path=a\n#SBATCH --uid=0", "run_dir=a\rb", "data.path=a\u2028b")
    ),
    (
        [*SLURM, "--run-dir", "100%"],
        "100%' holds one of \" $ % ' \\ `, which schedulers replace in the name of the log; "
        "choose another --run-dir",
    ),
    *(
        ([*SLURM, "--time", time], f"argument --time: {time!r} is no time; write H:MM:SS")
        for time in ("2:00", "120", "", "0:00:00", "1:60:00", "$x:00:00", "²:00:00")
    ),
    *(
        ([*SLURM, "--nodes", number], f"{number[:60]!r} is no whole number from 1 to 1000")
        for number in ("0", "1.5", "", "1e3", "٣", "10000001", "9" * 99)
    ),
    *(
        ([*SLURM, "--queue", queue], "is no name; use letters, digits and")
        for queue in ("", "a b", "$HOME", "`id`", 'a"b', "é", "a" * 201)
    ),
    *(
        ([*SLURM, f"--directive={text}"], "is no option of a scheduler; write it as in a job")
        for text in ("--comment=a\n#SBATCH --uid=0", "constraint=gpu", "--comment='a", "")
    ),
    ([*SLURM, "--directive=--comment=$HOME"], "which no scheduler replaces there; write the value"),
    (
        [*SLURM, "--ranks", "7", "--nodes", "2"],
        "--ranks: 7 does not spread evenly over 2 nodes; choose 6 or 8",
    ),
    (
        [*SLURM, "--ranks", "3", "--nodes", "4"],
        "--ranks: 3 does not spread evenly over 4 nodes; choose 4",
    ),
    (
        [*SLURM, "--margin", "1:00:00"],
        "--margin: 1:00:00 before the end of a job of 1:00:00 is before its start; choose a "
        "shorter one, or a longer --time",
    ),
    (
        [*SLURM, "--mpi", "pmi2"],
        "--mpi: pmi2 is for srun, and the launcher is mpirun; leave it out, or choose --launcher "
        "srun",
    ),
]
MISSING = [
    ([*SLURM, "--config", "quick.yaml"], "config 'quick.yaml': no such file and no"),
    ([*SLURM, "--setup", "no.sh"], "is no file; name an existing one"),
]


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [*((*row, 78) for row in REFUSED), *((*row, 66) for row in MISSING)],
)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(
    here: Path, submit: Axsparse, words: list[str], message: str, code: int
) -> None:
    assert_one_line(submit(*words), code, message)

    assert list(here.iterdir()) == [] and starts(commands(here)) == []


def test_what_the_scheduler_refuses_is_told_in_its_words_and_leaves_nothing(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = commands(here) / "sbatch"
    refusing.write_text("#!/bin/sh\necho 'sbatch: error: Invalid\n  account' >&2\nexit 1\n")
    assert_one_line(
        submit(*SLURM),
        78,
        "sbatch: refuses the job: sbatch: error: Invalid account; change what it names, see "
        "axsparse submit --help",
    )
    monkeypatch.setenv("PATH", str(here))
    assert_one_line(
        submit(*SLURM),
        66,
        "sbatch: no such command; submit from a login node of the cluster, or print the script "
        "with --dry-run",
    )
    assert not (here / "runs" / "quickstart").exists()


def test_a_run_directory_that_cannot_be_made_is_refused(here: Path, submit: Axsparse) -> None:
    (here / "file").touch()

    for name, reason in (("file", "File exists"), ("file/below/it", "Not a directory")):
        line = f"run_dir: {here / name} cannot be written ({reason}); choose another --run-dir"
        assert_one_line(submit(*SLURM, "--run-dir", name), 74, line)


# --- what is written ---------------------------------------------------------------------


def test_a_dry_run_prints_the_script_and_writes_nothing(here: Path, submit: Axsparse) -> None:
    options = read_slurm(submit(*SLURM, "--gpus-per-node=2", "--partition=gpu", "--dry-run")[1])

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
    arguments: list[str], cores: str, here: Path, submit: Axsparse
) -> None:
    """Python, the threads that fetch batches, those of NCCL and of torch would share one core."""
    start = ["--slurm", "--time", "1:00:00", "--config", "quickstart.yaml", "--dry-run"]

    assert read_slurm(submit(*start, *arguments)[1])["--cpus-per-task"] == cores


def test_a_job_gets_a_new_folder_unless_one_is_named(here: Path, submit: Axsparse) -> None:
    for more in ([], [], ["--run-dir", "mine"], ["--set", "run_dir=mine"]):
        assert submit(*SRUN, *more)[0] == 0
    assert starts(commands(here)) == [0] * 4

    assert sorted(path.name for path in (here / "runs").iterdir()) == ["quickstart", "quickstart-2"]
    assert begins(here / "runs" / "quickstart-2", 0) == [0]
    assert begins(here / "mine", 0) == [0, 6]
    assert (here / "runs" / "quickstart").stat().st_mode == (here / "runs").stat().st_mode
    assert (here / "runs" / "quickstart" / "job.sh").is_file()


def test_the_screen_says_what_was_submitted(here: Path, submit: Axsparse) -> None:
    assert submit(*SRUN, "--chain", "2")[1].splitlines() == [
        "Submitted batch job 41",
        f"2 ranks on 1 node · 1:00:00 at a time · up to 2 jobs · log → {here}/runs/quickstart/"
        "job-*.log",
    ]


HARD = "data.path=a  b/$HOME/`id`/'\"/*/é/\\n/@ranks@/!x"


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_values_arrive_at_the_ranks_as_they_were_given(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...]
) -> None:
    (here / "my conf").mkdir()
    (here / "my conf" / "-é $x.yaml").write_text("seed: 5\n")
    config = str(here / "my conf" / "-é $x.yaml")
    options = ["--config", config, "--set", HARD, "--steps", "6", "--run-dir", "my run"]

    assert submit(*scheduler, *options)[0] == 0

    first = history(here / "my run", 1)[0]
    assert first["arguments"] == [
        *(f"--config={config}", f"--set={HARD}", "--set=train.steps=6", "--set=run_dir=my run"),
        *("--run-dir=my run", "--resume=auto"),
    ]
    assert first["folder"] == str(here)
    assert first["ranks"] == "2"


def test_the_job_is_called_like_the_configuration(here: Path, submit: Axsparse) -> None:
    (here / "-my é.yaml").touch()

    script = submit(*SLURM, "--dry-run", "--config=-my é.yaml")[1]

    assert read_slurm(script)["--job-name"] == "my__"


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_a_file_of_the_sites_is_read_first_and_may_name_another_python(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...]
) -> None:
    standin_trainer.install(here / "another python")
    (here / "my modules.sh").write_text("export STANDIN_STEPS=3\npython=$PWD/'another python'\n")

    assert submit(*scheduler, "--setup", "my modules.sh", "--run-dir", "r")[0] == 0

    assert steps(here / "r", 0) == [1, 2, 3]
    assert history(here / "r", 0)[0]["executable"] == str(here / "another python")


# --- the text of the script --------------------------------------------------------------

EIGHT = ("--nodes", "2", "--ranks", "8", "--gpus-per-node", "4", "--time", "2:00:00")
NAMED = ("--account", "abc123", "--queue", "batch", "--job-name", "gpt", "--run-dir", "/s/gpt")


def script_of(*words: str) -> str:
    """The script of a command line for eight ranks on two nodes."""
    return bytes_of(*words).decode()


def bytes_of(*words: str) -> bytes:
    job = command.parser().parse_args([*EIGHT, *NAMED, *words])
    job.pairs = overrides_of(job)
    command.complete(job, load_config(job.config, job.pairs))
    return command.script(job)


def test_a_path_of_any_bytes_is_handed_on(here: Path) -> None:
    (here / os.fsdecode(b"\xff\xc3\xa9.yaml")).touch()

    script = bytes_of("--slurm", os.fsdecode(b"--config=\xff\xc3\xa9.yaml"))

    assert b"'--config=\xff\xc3\xa9.yaml'" in script


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
        "--no-kill": "",
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
    ("words", "launcher"),
    [
        (["--slurm", "--launcher", "srun"], "'srun --cpus-per-task=7'"),
        (
            ["--slurm", "--launcher", "srun", "--mpi", "pmi2"],
            "'srun --mpi=pmi2 --cpus-per-task=7'",
        ),
        (["--lsf"], "'jsrun -a1 -g1 -c7'"),
        (["--lsf", "--gpus-per-node", "0"], "'jsrun -a1 -g0 -c1'"),
        (["--lsf", "--launcher", "mpirun"], mpirun_path()),
        (["--slurm"], mpirun_path()),
    ],
    ids=str,
)
def test_the_supervisor_starts_ranks_by_the_launcher(words: list[str], launcher: str) -> None:
    lines = script_of(*words, "--restarts", "9").splitlines()

    assert f"export MPIRUN={launcher}" in lines
    start = '"$python" -m axsparse launch --restarts 9 8 --set=run_dir=/s/gpt &'
    assert start in lines


def test_no_placeholder_is_left_and_none_of_a_users_is_filled_in() -> None:
    script = script_of("--slurm", "--set", "data.path=x@ranks@")

    assert re.findall(r"@[a-z_]+@", script) == ["@ranks@"]


# --- jobs, from start to end -------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [SLURM, SRUN, LSF], ids=["mpirun", "srun", "jsrun"])
def test_a_job_that_runs_out_of_time_saves_and_goes_on(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")

    assert submit(*scheduler, "--run-dir", "r")[0] == 0

    # Requeueing kills the shell of a SLURM job; LSF looks at the code.
    assert starts(commands(here)) == [75 if "--lsf" in scheduler else -9, 0]
    for rank in (0, 1):
        assert begins(here / "r", rank) == [0, 3]
        assert steps(here / "r", rank) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("code", by_default(["138"], ["255", "138"]))
@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["srun", "jsrun"])
def test_a_code_that_is_lost_to_the_warning_is_the_warnings(
    here: Path,
    submit: Axsparse,
    scheduler: tuple[str, ...],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bash loses one in three where a signal comes as the ranks end; Python, which takes its
    handlers away before it ends, is ended by the signal then."""
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_WARNED_CODE", code)

    assert submit(*scheduler, "--run-dir", "r")[0] == 0

    assert starts(commands(here)) == [75 if "--lsf" in scheduler else -9, 0]


def test_a_killed_rank_ends_the_job_with_the_launchers_code_and_the_next_goes_on(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under mpirun; in a chain below, also under srun and jsrun."""
    monkeypatch.setenv("STANDIN_KILL_AT", "5")
    arguments = (*SLURM, "--run-dir", "r", "--restarts", "0")

    assert [submit(*arguments)[0], submit(*arguments)[0]] == [0, 0]

    killed, done = starts(commands(here))
    assert (killed in KILLED, done) == (True, 0)
    assert begins(here / "r", 1) == [0, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("scheduler", [SLURM, SRUN, LSF], ids=["mpirun", "srun", "jsrun"])
def test_a_killed_rank_is_started_again_within_the_job(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KILL_AT", "5")

    assert submit(*scheduler, "--run-dir", "r")[0] == 0

    assert starts(commands(here)) == [0]
    assert begins(here / "r", 1) == [0, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_a_chain_goes_on_until_it_is_done_and_drops_the_rest(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_KILL_AT", "5")

    words = ("--run-dir", "r", "--chain", "5", "--restarts", "0")
    assert submit(*scheduler, *words)[0] == 0

    assert starts(commands(here)) == [75, 137, 0]
    assert begins(here / "r", 1) == [0, 3, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("scheduler", [SRUN, LSF], ids=["slurm", "lsf"])
def test_a_chain_does_not_repeat_a_mistake(
    here: Path, submit: Axsparse, scheduler: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EXIT", "2:78")

    assert submit(*scheduler, "--run-dir", "r", "--chain", "5")[0] == 0

    assert starts(commands(here)) == [78]


def test_the_last_of_a_chain_has_no_rest_to_drop(here: Path, submit: Axsparse) -> None:
    assert submit(*LSF, "--run-dir", "r", "--chain", "1")[0] == 0
    assert submit(*LSF, "--run-dir", "r", "--chain", "2")[0] == 0

    assert starts(commands(here)) == [0, 0]


def test_a_scheduler_that_does_not_requeue_is_reported(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    (commands(here) / "refuse-requeue").touch()

    assert submit(*SRUN, "--run-dir", "r")[0] == 0

    assert starts(commands(here)) == [75]
    assert (here / "r" / "job-41.log").read_text().splitlines()[-1] == (
        "axsparse: error: saved, but SLURM does not requeue job 41; submit it again"
    )


# --- the command -------------------------------------------------------------------------


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = command.DESCRIPTION.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("axsparse ")]

    assert len(lines) == 3
    for line in lines:
        command.parser().parse_args(shlex.split(line)[2:])
