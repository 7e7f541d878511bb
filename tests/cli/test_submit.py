"""`axsparse submit`: its refusals, the scripts it fills in, and that their jobs end well.

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
from support.commands import Axsparse, assert_one_line
from support.directives import assert_a_shell_reads, read
from support.exhaustive import by_default
from support.standin_cluster import install, starts

from axsparse.cli import submit as command
from axsparse.config.load import packaged_folder
from axsparse.runtime.errors import ConfigError, MissingInputError

ALL = tuple(command.SCHEDULERS)
STAGES = ("--set", "layout.g_inter=auto")
ASKED = (
    *("--ranks", "2", "--nodes", "2", "--time", "1:00:00"),
    *(*STAGES, "--config", "quickstart.yaml"),
)
SLURM = ("--slurm", *ASKED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with stand-in schedulers on PATH and a stand-in for training."""
    folder = tmp_path / "my é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    commands = install(tmp_path / "commands")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(standin_trainer.install(tmp_path / "python")))
    for name in ("PMI_RANK", "SLURM_PROCID", "AXSPARSE_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def submit(axsparse: Axsparse) -> Axsparse:
    """`submit("--slurm", …)`: exit code, screen and errors."""
    return lambda *words: axsparse("submit", *words)


def commands(here: Path) -> Path:
    return here.parent / "commands"


def log(here: Path) -> str:
    """The output of all jobs."""
    return (commands(here) / "job.log").read_text()


def history(run_dir: Path, rank: int) -> list[Any]:
    """The record of a rank of the stand-in: an object a start, then its steps."""
    lines = (run_dir / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def begins(run_dir: Path, rank: int) -> list[int]:
    """After which step each start of a rank began."""
    return [line["begin"] for line in history(run_dir, rank) if isinstance(line, dict)]


def steps(run_dir: Path, rank: int) -> list[int]:
    return [line for line in history(run_dir, rank) if isinstance(line, int)]


# --- refusals ----------------------------------------------------------------------------


def test_a_scheduler_says_itself_why_it_takes_no_job(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (commands(here) / "refuses").touch()
    job = command.parser().parse_args([*SLURM, "--now"])

    with pytest.raises(ConfigError, match=r"^sbatch: exit code 1; change what it names above, see"):
        command._submit(job)
    assert capfd.readouterr().err == "slurm: error: Invalid\n  account\n"
    monkeypatch.setenv("PATH", str(here))
    line = (
        "sbatch: no such command; submit from a login node of the cluster, or print the script "
        "without --now"
    )
    with pytest.raises(MissingInputError, match=f"^{line}$"):
        command._submit(job)


def test_a_script_that_cannot_be_written_is_refused(here: Path, submit: Axsparse) -> None:
    (here / "file").touch()

    line = f"{here / 'file/below.sh'}: cannot be written (File exists); choose another --run-dir"
    assert_one_line(submit(*SLURM, "--now", "--run-dir", "file/below"), 74, line)


# --- the text of the script --------------------------------------------------------------

EIGHT = ("--nodes", "2", "--ranks", "8", "--gpus-per-node", "4", "--time", "2:00:00")
NAMED = ("--account", "abc123", "--queue", "batch", "--run-dir", "/s/gpt")
TRAINED = (*STAGES, "--config", "quickstart.yaml")


@pytest.mark.parametrize("name", ALL)
def test_a_template_fits_a_screen_and_all_have_one_loop(name: str) -> None:
    texts = {one: (packaged_folder("launch") / f"{one}.sh").read_text() for one in ALL}

    assert len(texts[name].splitlines()) <= 60
    assert texts[name].partition("\nnewest")[2] == texts["slurm"].partition("\nnewest")[2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "slurm",
            {
                "--job-name": "quickstart",
                "--nodes": "2",
                "--ntasks-per-node": "4",
                "--cpus-per-task": "7",
                "--gpus-per-node": "4",
                "--time": "2:00:00",
                "--signal": "B:USR1@300",
                "--no-kill": "",
                "--requeue": "",
                "--open-mode": "append",
                "--output": "%x-%j.log",
                "--account": "abc123",
                "--partition": "batch",
            },
        ),
        (
            "lsf",
            {
                "-J": "quickstart",
                "-n": "56",
                "-R": "span[ptile=28]",
                "-gpu": "num=4",
                "-W": "120",
                "-r": "",
                "-o": "quickstart-%J.log",
                "-P": "abc123",
                "-q": "batch",
            },
        ),
        (
            "pbs",
            {
                "-N": "quickstart",
                "-S": "/bin/bash",
                "-l select": "2:ncpus=28:mpiprocs=4:ngpus=4",
                "-l place": "scatter",
                "-l walltime": "2:00:00",
                "-W": "tolerate_node_failures=all",
                "-j": "oe",
                "-k": "doe",
                "-A": "abc123",
                "-q": "batch",
            },
        ),
        (
            "flux",
            {
                "--job-name": "quickstart",
                "--nodes": "2",
                "--exclusive": "",
                "--time-limit": "120m",
                "--output": "quickstart-{{id}}.log",
                "--bank": "abc123",
                "--queue": "batch",
            },
        ),
    ],
)
def test_directives_say_what_the_job_asks_for(
    name: str, options: dict[str, str], here: Path, submit: Axsparse
) -> None:
    code, script, errors = submit(f"--{name}", *EIGHT, *NAMED, *TRAINED)

    assert (code, errors) == (0, "")
    assert read(name, script) == options
    assert_a_shell_reads(script)
    assert re.findall(r"@[a-z_]+@", script) == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--lsf", "--time", "1:00:01"], {"-W": "61"}),
        (["--lsf", "--gpus-per-node", "0", "--directive=-x"], {"-gpu": None, "-x": ""}),
        (["--pbs", "--gpus-per-node", "0"], {"-l select": "2:ncpus=4:mpiprocs=4"}),
        (["--pbs", "--directive=-l filesystems=home:eagle"], {"-l filesystems": "home:eagle"}),
        (["--slurm", "--gpus-per-node", "0"], {"--gpus-per-node": None}),
        (["--slurm", "--time", "48:00:00"], {"--time": "48:00:00"}),
        (["--slurm", "--gpus-per-node", "2"], {"--cpus-per-task": "3"}),
        (["--slurm", "--set", "train.threads=9"], {"--cpus-per-task": "9"}),
        (["--slurm", "--cpus-per-rank", "1"], {"--cpus-per-task": "1"}),
        (
            ["--slurm", "--directive=--constraint=gpu", "--directive=--exclusive"],
            {"--constraint": "gpu", "--exclusive": ""},
        ),
        (["--flux", "--directive=--requires=host:a[1-2]"], {"--requires": "host:a[1-2]"}),
    ],
    ids=" ".join,
)
def test_directives_follow_the_options(
    words: list[str], options: dict[str, str | None], here: Path, submit: Axsparse
) -> None:
    script = submit(*EIGHT, *NAMED, *TRAINED, *words)[1]

    found = read(words[0].removeprefix("--"), script)
    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({}, "replica=1 fewer=(--set=layout.g_inter=auto"),
        ({"g_inter": 2}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_inter": 2, "g_data": 4}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_data": 2}, "replica=4 fewer=(--set=layout.g_inter=4"),
        ({"g_data": 2, "g_tensor": 2}, "replica=4 fewer=(--set=layout.g_inter=2"),
        ({"g_tensor": 2}, "replica=2 fewer=(--set=layout.g_inter=auto"),
    ],
    ids=str,
)
def test_fewer_nodes_train_fewer_replicas_of_the_same_stages(
    asked: dict[str, int], line: str, here: Path, submit: Axsparse
) -> None:
    words = [f"--set=layout.{key}={value}" for key, value in asked.items()]

    script = submit("--slurm", *EIGHT, *TRAINED, *words)[1]

    assert f" {line} --set=layout.g_data=auto) #" in script


def test_the_job_is_called_like_the_configuration(here: Path, submit: Axsparse) -> None:
    (here / "-my é.yaml").touch()

    script = submit(*SLURM, "--config=-my é.yaml")[1]

    assert read("slurm", script)["--job-name"] == "my__"


def test_the_environments_own_mpirun_starts_ranks(here: Path, submit: Axsparse) -> None:
    assert "start() { exec mpirun --host" in submit(*SLURM)[1]
    own = Path(sys.executable).with_name("mpirun")
    own.touch()
    assert f"start() {{ exec {shlex.quote(str(own))} --host" in submit(*SLURM)[1]


def test_a_path_of_any_bytes_is_handed_on(here: Path) -> None:
    (here / os.fsdecode(b"\xff\xc3\xa9.yaml")).touch()
    words = [*SLURM[:-2], os.fsdecode(b"--config=\xff\xc3\xa9.yaml")]

    command._submit(command.parser().parse_args([*words, "--now"]))

    assert b"'--config=\xff\xc3\xa9.yaml'" in next((here / "runs").glob("*.sh")).read_bytes()


HARD = "data.path=a  b/$HOME/`id`/'\"/*/é/\\n/@ranks@/!x"


@pytest.mark.parametrize("name", by_default(["slurm"], ALL))
def test_values_arrive_at_the_ranks_as_they_were_given(
    name: str, here: Path, submit: Axsparse
) -> None:
    (here / "my conf").mkdir()
    (here / "my conf" / "-é $x.yaml").write_text("seed: 5\n")
    config = str(here / "my conf" / "-é $x.yaml")
    options = ["--config", config, "--set", HARD, "--steps", "6", "--run-dir", "my run"]

    assert submit(f"--{name}", *ASKED, *options, "--now")[0] == 0

    first = history(here / "my run", 1)[0]
    assert first["arguments"] == [
        *(f"--config={config}", "--set=layout.g_inter=auto", f"--set={HARD}"),
        *("--set=train.steps=6", "--set=run_dir=my run"),
        *(f"--run-dir={here}/my run", "--resume=auto"),
    ], log(here)
    assert first["folder"] == str(here)
    assert first["ranks"] == "2"


# --- jobs, from start to end -------------------------------------------------------------


def test_a_job_gets_a_new_folder_unless_one_is_named(here: Path, submit: Axsparse) -> None:
    for more in ([], [], ["--run-dir", "mine"], ["--set", "run_dir=mine"]):
        assert submit(*SLURM, *more, "--now")[0] == 0
    assert starts(commands(here)) == [0] * 4

    assert sorted(path.name for path in (here / "runs").iterdir()) == [
        *("quickstart", "quickstart-2", "quickstart-2.sh", "quickstart.sh"),
    ]
    assert begins(here / "runs" / "quickstart-2", 0) == [0]
    assert begins(here / "mine", 0) == [0, 6]


def test_the_screen_says_what_was_submitted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command._submit(command.parser().parse_args([*SLURM, "--now"]))

    assert capfd.readouterr().out.splitlines() == [
        f"script → {here}/runs/quickstart.sh",
        "Submitted batch job 41",
    ]


def test_a_file_of_the_sites_is_read_first(here: Path, submit: Axsparse) -> None:
    (here / "my modules.sh").write_text("export STANDIN_STEPS=3\n")

    assert submit(*SLURM, "--setup", "my modules.sh", "--run-dir", "r", "--now")[0] == 0

    assert steps(here / "r", 0) == [1, 2, 3]


OFTEN = ("      sleep 1\n", "      sleep 0.1\n")
FORWARD = "      sleep 1\n      [ ! -e r/waits ] || { rm r/waits && SECONDS=$save_at; }\n"
"""Puts the script's clock forward once all ranks wait for its end."""


def run(
    here: Path,
    submit: Axsparse,
    name: str,
    *more: str,
    edit: tuple[tuple[str, str], ...] = (),
    pause: int = 0,
) -> str:
    """Fill in a script, edit it as a user may, submit it, and wait for all jobs; their log.

    It looks often whether the ranks have ended.
    """
    script = submit(f"--{name}", *ASKED, "--run-dir", "r", *more)[1]
    for before, after in (*edit, ("pause=30", f"pause={pause}"), OFTEN):
        assert before in script
        script = script.replace(before, after)
    (here / "job.sh").write_text(script)
    with (here / "job.sh").open() as text:
        program = command.SCHEDULERS[name]
        subprocess.run(program, stdin=text, capture_output=True, check=True)
    return log(here)


@pytest.mark.parametrize("name", ALL)
def test_a_job_that_runs_out_of_time_saves_and_submits_itself_again(
    name: str, here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock, which this one puts forward once all ranks wait for that."""
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_WARN_PID", "0")

    said = run(here, submit, name, edit=(("      sleep 1\n", FORWARD),))

    assert starts(commands(here)) == [75, 0], said
    for rank in (0, 1):
        assert begins(here / "r", rank) == [0, 3]
        assert steps(here / "r", rank) == [1, 2, 3, 4, 5, 6]
    assert (here / "r.sh").read_text() == (here / "job.sh").read_text()


@pytest.mark.parametrize("code", ["75", "138"])
def test_a_job_that_is_told_of_its_end_submits_itself_whatever_the_ranks_leave_with(
    code: str, here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes its handlers away before it ends, and is ended by the signal then."""
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_WARNED_CODE", code)

    assert run(here, submit, "slurm") and starts(commands(here)) == [75, 0]


@pytest.mark.parametrize("name", ALL)
def test_a_job_whose_node_dies_goes_on_with_the_others(
    name: str, here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KILL_AT", "5")
    monkeypatch.setenv("STANDIN_DIES", str(commands(here)))

    said = run(here, submit, name, "--set", "layout.g_data=2")

    assert starts(commands(here)) == [0], said
    assert begins(here / "r", 1) == [0]
    first, second = (line for line in history(here / "r", 0) if isinstance(line, dict))
    assert (first["ranks"], second["ranks"], second["node"]) == ("2", "1", "node1")
    fewer = {"--set=layout.g_inter=1", "--set=layout.g_data=auto"}
    assert fewer <= {*second["arguments"]} and not fewer & {*first["arguments"]}
    assert "axsparse: 1 ranks on 1 of 2 nodes\n" in said
    assert steps(here / "r", 0)[-1] == 6


def test_a_killed_rank_is_started_again(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KILL_AT", "5")

    said = run(here, submit, "slurm")

    assert starts(commands(here)) == [0], said
    assert begins(here / "r", 1) == [0, 4]
    assert steps(here / "r", 1) == [1, 2, 3, 4, 5, 5, 6]


def test_srun_starts_ranks_where_the_site_wants_it(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KILL_AT", "5")
    monkeypatch.setenv("STANDIN_DIES", str(commands(here)))
    other = (
        ("start() { exec mpirun", "# start() { exec mpirun"),
        ("# start() { exec srun", "start() { exec srun"),
    )

    said = run(here, submit, "slurm", edit=other)

    assert starts(commands(here)) == [0], said
    assert steps(here / "r", 0)[-1] == 6


def test_failures_without_a_checkpoint_wait_longer_each_time_and_end_the_job(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EXIT", "1:70")
    waits = (("wait--)); do sleep 1; done", "wait--)); do echo waits; done"),)

    said = run(here, submit, "slurm", edit=waits, pause=1)

    assert starts(commands(here)) == [70]
    assert begins(here / "r", 0) == [0] * 5
    assert [len(between.split()) for between in re.findall(r"(?:waits\n)+", said)] == [2, 4, 8, 16]
    assert said.splitlines()[-1] == "axsparse: error: failed 5 times without a new checkpoint"


@pytest.mark.parametrize("code", [65, 66, 75, 78])
def test_a_job_does_not_repeat_what_would_only_happen_again(
    code: int, here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EXIT", f"3:{code}")

    run(here, submit, "slurm")

    assert starts(commands(here)) == [code] and begins(here / "r", 0) == [0]


def test_a_job_without_a_new_checkpoint_has_no_continuation(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(here, submit, "slurm", edit=(("first=$(newest)", "save_at=0 first=$(newest)"),))

    assert starts(commands(here)) == [70]
    assert said == "axsparse: error: no new checkpoint in this job, so none follows it\n"


def test_ranks_that_do_not_end_in_time_are_killed_and_the_job_goes_on(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")
    monkeypatch.setenv("STANDIN_WARN_PID", "0")
    deaf = ("tell() { kill -USR1", "tell() { SECONDS=$((save_at + margin)); : -USR1")

    said = run(here, submit, "slurm", edit=(deaf, ("      sleep 1\n", FORWARD)))

    assert starts(commands(here)) == [75, 0], said


def test_a_scheduler_that_takes_no_jobs_from_nodes_is_reported(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_WARN_AT", "3")

    said = run(here, submit, "slurm", edit=(('sbatch "$script"', "false"),))

    assert starts(commands(here)) == [75]
    assert said.splitlines()[-1] == (
        f"axsparse: error: saved, but {here}/r.sh cannot be submitted from here; submit it by hand"
    )


# --- the command -------------------------------------------------------------------------


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = command.DESCRIPTION.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("axsparse ")]

    assert len(lines) == 3
    for line in lines:
        command.parser().parse_args(shlex.split(line.partition(">")[0])[2:])
