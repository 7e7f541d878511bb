"""A script for sbatch: its directives, and how it starts the ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.directives import read_slurm
from support.requests import assert_a_shell_reads, commands_of, make_request

from axsparse.cli.submit.slurm import render

HARD = "data.path=a b/$HOME/`id`/'\"/*/é"


def test_the_directives_say_what_the_job_asks_for() -> None:
    assert read_slurm(render(make_request())) == {
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
        "--output": "/scratch/project/runs/gpt/job-%j.log",
        "--account": "abc123",
        "--partition": "batch",
    }


def test_what_is_not_asked_for_is_left_to_the_site() -> None:
    options = read_slurm(render(make_request(account=None, queue=None, gpus_per_node=0)))

    assert not {"--account", "--partition", "--gpus-per-node", "--array"} & set(options)


def test_directives_of_the_site_are_added() -> None:
    script = render(make_request(directives=("--constraint=gpu", '--comment="a b"')))

    options = read_slurm(script)
    assert (options["--constraint"], options["--comment"]) == ("gpu", "a b")


def test_a_chain_is_an_array_of_which_one_runs_at_a_time() -> None:
    script = render(make_request(chain=3))

    options = read_slurm(script)
    assert options["--array"] == "1-3%1"
    assert options["--output"].endswith("/job-%A_%a.log")
    assert "scontrol requeue" not in script


def test_a_log_with_blanks_is_one_word() -> None:
    options = read_slurm(render(make_request(run_dir=Path("/scratch/my runs/é"))))

    assert options["--output"] == "/scratch/my runs/é/job-%j.log"


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({"mpirun": "/my env/bin/mpirun"}, "'/my env/bin/mpirun' -n 8"),
        ({"launcher": "srun"}, 'srun -K1 --ntasks=8 --cpus-per-task=7 sh -c "$rank" "$left"'),
        (
            {"launcher": "srun", "mpi": "pmi2"},
            'srun -K1 --mpi=pmi2 --ntasks=8 --cpus-per-task=7 sh -c "$rank" "$left"',
        ),
    ],
)
def test_ranks_are_started_by_mpirun_or_srun(values: dict[str, Any], command: str) -> None:
    line = commands_of(render(make_request(**values)), command.split()[0])

    assert line == f'{command} "$python" -m axsparse.train --config=gpt.yaml --resume=auto &'


def test_every_word_of_the_command_arrives_as_it_was_given() -> None:
    train = ("-m", "axsparse.train", f"--set={HARD}")

    line = commands_of(render(make_request(train=train)), "mpirun")

    assert shlex.split(line.removesuffix("&")) == ["mpirun", "-n", "8", "$python", *train]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"chain": 4},
        {"launcher": "srun", "mpi": "pmix"},
        {"setup": Path("/scratch/my modules.sh"), "folder": Path("/scratch/it's here")},
        {"copy_to": Path("/local disk"), "train": ("-m", "axsparse.train", f"--set={HARD}")},
    ],
)
def test_shells_can_read_the_script(values: dict[str, Any]) -> None:
    assert_a_shell_reads(render(make_request(**values)))


def test_no_placeholder_is_left_and_none_of_a_users_is_filled_in() -> None:
    script = render(make_request(train=("-m", "axsparse.train", "--set=data.path=@ranks@")))

    assert re.findall(r"@[a-z_]+@", script) == ["@ranks@"]
