"""A script for bsub: its directives, and how it starts the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.directives import read_lsf
from support.requests import assert_a_shell_reads, commands_of
from support.requests import make_request as any_request

from axsparse.cli.submit.job_request import JobRequest
from axsparse.cli.submit.lsf import check_lsf, render
from axsparse.runtime.errors import ConfigError


def make_request(**values: Any) -> JobRequest:
    return any_request(**{"launcher": "jsrun", **values})


def test_the_directives_say_what_the_job_asks_for() -> None:
    assert read_lsf(render(make_request())) == {
        "-J": "gpt",
        "-nnodes": "2",
        "-W": "2:00",
        "-wa": "USR1",
        "-wt": "5",
        "-r": "",
        "-Q": "75",
        "-o": "/scratch/project/runs/gpt/job-%J.log",
        "-P": "abc123",
        "-q": "batch",
    }


def test_times_are_rounded_up_to_whole_minutes() -> None:
    options = read_lsf(render(make_request(seconds=3601, margin=61)))

    assert (options["-W"], options["-wt"]) == ("1:01", "2")


def test_with_mpirun_the_slots_are_spread_over_the_nodes() -> None:
    script = render(make_request(launcher="mpirun", directives=("-x",)))

    options = read_lsf(script)
    assert (options["-n"], options["-R"], options["-gpu"]) == ("8", "span[ptile=4]", "num=4")
    assert "-nnodes" not in options and options["-x"] == ""
    assert commands_of(script, "mpirun").startswith('mpirun -n 8 "$python" -m axsparse.train')


@pytest.mark.parametrize(("gpus", "each"), [(4, 1), (0, 0)])
def test_jsrun_gives_each_rank_its_cores_and_gpu(gpus: int, each: int) -> None:
    line = commands_of(render(make_request(gpus_per_node=gpus)), "jsrun")

    assert line == (
        f'jsrun -n 8 -a1 -g{each} -c7 "$python" -m axsparse.train --config=gpt.yaml --resume=auto &'
    )


def test_a_chain_is_an_array_of_which_one_runs_at_a_time() -> None:
    script = render(make_request(chain=3))

    options = read_lsf(script)
    assert options["-J"] == "gpt[1-3]%1"
    assert options["-o"].endswith("/job-%J_%I.log")
    assert not {"-Q", "-r"} & set(options)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"chain": 4},
        {"launcher": "mpirun"},
        {"copy_to": Path("/local disk"), "setup": Path("/scratch/my modules.sh")},
    ],
)
def test_shells_can_read_the_script(values: dict[str, Any]) -> None:
    assert_a_shell_reads(render(make_request(**values)))


def test_ranks_that_share_gpus_are_not_for_jsrun() -> None:
    with pytest.raises(ConfigError) as caught:
        check_lsf(make_request(gpus_per_node=2))

    assert str(caught.value) == (
        "--gpus-per-node: 2 for 4 ranks a node, but jsrun gives each rank one; choose 4, or "
        "--launcher mpirun"
    )


def test_without_jsrun_the_environment_cannot_be_copied() -> None:
    with pytest.raises(ConfigError) as caught:
        check_lsf(make_request(launcher="mpirun", copy_to=Path("/local")))

    assert str(caught.value) == (
        "--copy-environment: mpirun cannot start one process on each node under LSF; choose "
        "--launcher jsrun, or leave the option out"
    )


@pytest.mark.parametrize("gpus", [0, 4])
def test_what_lsf_can_do_passes(gpus: int) -> None:
    check_lsf(make_request(gpus_per_node=gpus, copy_to=Path("/local")))
