"""What a job may ask for, and how a mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.requests import make_request

from axsparse.cli.submit.job_request import check, clock, count, directive, duration, name, one_line
from axsparse.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:00:01", 1), ("2:00:00", 7200), ("100:59:59", 363599), ("2-00:00:00", 172800)],
)
def test_times_are_hours_minutes_and_seconds(text: str, seconds: int) -> None:
    assert duration("--time", text) == seconds


@pytest.mark.parametrize(
    "text",
    ["2:00", "120", "", "0:00:00", "1:60:00", "1:00:00\n", "$x:00:00", "²:00:00", "-1:00:00"],
)
def test_a_time_that_schedulers_read_differently_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        duration("--time", text)

    assert str(caught.value) == (
        f"--time: {text!r} is no time; write H:MM:SS or D-HH:MM:SS, such as 2:00:00"
    )


@given(st.integers(1, 10**7))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_a_clock_is_read_back(seconds: int) -> None:
    assert duration("--time", clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "1e3", "٣", "10000001", "9" * 99, "1\n"])
def test_a_count_is_a_whole_number(text: str) -> None:
    with pytest.raises(ConfigError, match="is no whole number from 1 to 10000000; choose one"):
        count("--nodes", text)


def test_some_counts_may_be_0() -> None:
    assert count("--gpus-per-node", "0", least=0) == 0


@pytest.mark.parametrize("text", ["", "-x", "a b", "a\nb", "$HOME", "`id`", 'a"b', "é", "a" * 201])
def test_a_name_has_no_letter_with_a_meaning(text: str) -> None:
    with pytest.raises(ConfigError, match="is no name; use letters, digits and"):
        name("--account", text)


def test_names_of_sites_pass() -> None:
    assert name("--account", "csc190@gpu_a100-80.q") == "csc190@gpu_a100-80.q"


def test_directives_of_the_site_pass_as_they_are() -> None:
    assert directive('-R "select[type==any]"') == '-R "select[type==any]"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--comment=a\n#SBATCH --uid=0", "holds a line break or another control character"),
        ("--comment=a\u2028b", "holds a line break or another control character"),
        ("--comment=$HOME", "which no scheduler replaces there; write the value itself"),
        ("--comment=`id`", "which no scheduler replaces there; write the value itself"),
        ("constraint=gpu", "is no option of a scheduler; write it as in a job script"),
        ("--comment='a", "is no option of a scheduler; write it as in a job script"),
        ("", "is no option of a scheduler; write it as in a job script"),
    ],
)
def test_a_directive_is_an_option_on_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directive(text)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=20))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_what_passes_as_one_line_is_one_whoever_reads_it(text: str) -> None:
    refused = ""
    try:
        one_line("--set", text)
    except ConfigError as error:
        refused = str(error)

    assert len((refused or text).splitlines()) <= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"ranks": 7},
            "--ranks: 7 does not spread evenly over 2 nodes; choose 6 or 8",
        ),
        (
            {"ranks": 3, "nodes": 4},
            "--ranks: 3 does not spread evenly over 4 nodes; choose 4",
        ),
        (
            {"threads": 8},
            "--cpus-per-rank: 7 is below train.threads 8; choose at least 8",
        ),
        (
            {"seconds": 300},
            "--margin: 0:05:00 before the end of a job of 0:05:00 is before its start; choose a "
            "shorter one, or a longer --time",
        ),
        (
            {"mpi": "pmi2"},
            "--mpi: pmi2 is for srun, and the launcher is mpirun; leave it out, or choose "
            "--launcher srun",
        ),
        (
            {"copy_to": Path("tmp")},
            "--copy-environment: 'tmp' is no folder on each node; name one from the root on, "
            "such as /tmp",
        ),
        (
            {"copy_to": Path("/")},
            "--copy-environment: '/' is no folder on each node; name one from the root on, "
            "such as /tmp",
        ),
        (
            {"copy_to": Path("/local"), "python": Path("/usr/bin/python3"), "prefix": Path("/usr")},
            "--copy-environment: /usr/bin/python3 is not of a venv or conda environment that "
            "could be copied; install axsparse into one, or leave the option out",
        ),
        (
            {"run_dir": Path("/scratch/100%")},
            "run_dir: '/scratch/100%' holds one of \" $ % ' \\ `, which schedulers replace in the "
            "name of the log; choose another --run-dir",
        ),
        (
            {"run_dir": Path("/scratch/a\n#SBATCH --uid=0")},
            "run_dir: '/scratch/a\\n#SBATCH --uid=0' holds a line break or another control "
            "character; remove it",
        ),
        (
            {"train": ("-m", "axsparse.train", "--set=data.path=a\nb")},
            "--config, --set: '--set=data.path=a\\nb' holds a line break or another control "
            "character; remove it",
        ),
        (
            {"setup": Path("/scratch/a\rb")},
            "--setup: '/scratch/a\\rb' holds a line break or another control character; remove it",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(make_request(**values))

    assert str(caught.value) == message


def test_an_environment_of_its_own_can_be_copied(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()

    check(make_request(copy_to=Path("/local"), prefix=tmp_path, python=tmp_path / "bin/python"))
