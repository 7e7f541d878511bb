"""The command lines by which launchers start ranks on some hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.runtime.errors import ConfigError, MissingInputError
from axsparse.runtime.restarts.decision import Host, Placing
from axsparse.runtime.restarts.launchers import (
    LSF_PROBE,
    SLURM_PROBE,
    allocated_hosts,
    command,
    parse_hosts,
    refuse_missing,
)

PLACING = Placing((Host("a", 2), Host("b", 1)))


@pytest.mark.parametrize(
    ("policy", "told"), [("", "slot"), (":oversubscribe", "slot:oversubscribe"), ("core", "slot")]
)
def test_mpirun_is_told_the_hosts_in_a_form_that_mpich_and_open_mpi_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, told: str
) -> None:
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", policy)
    started = command(["/x/mpirun", "-v"], PLACING, ["rank"], tmp_path, named=True)

    assert started.words == ("/x/mpirun", "-v", "--host", "a:2,b:1", "-n", "3", "rank")
    assert started.environment == {
        "PRTE_MCA_rmaps_default_mapping_policy": told,
        "SLURM_OVERLAP": "1",  # an earlier start may not have ended yet, as far as SLURM knows
    }


def test_a_launcher_that_knows_its_hosts_is_told_the_number_of_ranks(tmp_path: Path) -> None:
    for launcher in ("mpirun", "jsrun"):
        started = command([launcher], PLACING, ["rank"], tmp_path, named=False)
        assert started.words == (launcher, "-n", "3", "rank")


def test_srun_fills_one_host_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    started = command(["srun", "--mpi=pmi2"], PLACING, ["rank"], tmp_path, named=True)

    assert started.words[:9] == (
        *("srun", "--mpi=pmi2", "-K1", "--ntasks=3"),
        *("--distribution=block", "--no-kill", "--nodes=2", "--ntasks-per-node=2"),
        "--nodelist=a,b",
    )
    assert started.words[-2:] == (str(tmp_path / "left-41"), "rank")
    assert started.environment == {"SLURM_OVERLAP": "1"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b-1.site:2", [Host("a", 4), Host("b-1.site", 2)]),
        ("a,b", [Host("a", 4), Host("b", 4)]),
        ("a:3,b", [Host("a", 3), Host("b", 4)]),
    ],
)
def test_hosts_take_what_is_said_or_their_share(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text, 8) == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:4,,b", "is no list of different hosts; write it like node1:4,node2:4"),
        ("a:0", "is no list of different hosts"),
        ("-x:4", "is no list of different hosts"),
        ("a:4,a:4", "is no list of different hosts"),
        ("a,b,c", "8 ranks do not spread evenly over 3 hosts; say how many each takes, like a:3"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: ") as refused:
        parse_hosts(text, 8)
    assert said in str(refused.value)


def test_a_job_of_slurm_has_the_hosts_of_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "scontrol"
    control.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    found = allocated_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, 8)

    assert found == ([Host("n1", 4), Host("n2", 4)], SLURM_PROBE)


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("n1 4 n2 4", ["n1", "n2"]),
        ("batch 1 n1 42 n2 42", ["n1", "n2"]),  # jsrun's first host only runs the script
        ("n1 1 n2 1", ["n1", "n2"]),
    ],
)
def test_a_job_of_lsf_has_the_hosts_that_take_ranks(hosts: str, found: list[str]) -> None:
    expected = [Host(name, 4) for name in found], LSF_PROBE
    assert allocated_hosts({"LSB_MCPU_HOSTS": hosts}, 8) == expected


def test_outside_of_a_job_hosts_are_not_known() -> None:
    assert allocated_hosts({}, 8) is None


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingInputError, match="--probe: no command 'no-such'; install it, or"):
        refuse_missing(["no-such", "{host}"], "--probe")


@pytest.mark.parametrize(
    ("state", "starts", "fit"),
    [
        *[("idle", 0, 0), ("alloc", 0, 0), ("mix", 0, 0), ("mix", 1, 1)],
        *[("alloc*", 0, 1), ("drng", 0, 1), ("drain", 0, 1), ("", 0, 1)],
    ],
)
def test_slurms_probe_refuses_nodes_that_are_drained_or_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, starts: int, fit: int
) -> None:
    import shlex
    import subprocess

    info = tmp_path / "sinfo"
    info.write_text(f"#!/bin/sh\nprintf '%s\\n' '{state}'\n")
    info.chmod(0o755)
    run = tmp_path / "srun"
    run.write_text(
        f'#!/bin/sh\ncase "$*" in *" --nodelist=n1 true") exit {starts} ;; esac\nexit 3\n'
    )
    run.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = [word.replace("{host}", "n1") for word in shlex.split(SLURM_PROBE)]

    assert subprocess.run(words, check=False).returncode == fit
