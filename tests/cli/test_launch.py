"""`axsparse launch`: what is started again where, and what is not.

The training is one that counts steps (`support/standin_trainer.py`), under the real mpirun.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import standin_trainer
from support.commands import Axsparse, assert_one_line
from support.exhaustive import by_default
from support.mpirun import ENVIRONMENT, KILLED, LONGEST_SECONDS, mpirun_path
from support.pretend_hosts import PretendHosts

QUICK = ("--config", "quickstart.yaml")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that trains by counting steps."""
    return standin_trainer.install(tmp_path / "python")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[PretendHosts]:
    (tmp_path / "hosts").mkdir()
    pretended = PretendHosts(tmp_path / "hosts")
    yield pretended
    for name in ("a", "b", "c"):
        pretended.die(name)


def start(python: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "axsparse", "launch", *arguments],
        cwd=python.parent,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHON": str(python),
            "MPIRUN": mpirun_path(),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell would hand down ignored signals.
        start_new_session=True,
    )


def on_hosts(hosts: PretendHosts, listed: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The options and the environment of a start on such hosts."""
    words = ("--hosts", listed, "--probe", hosts.probe(), "--silence", "2")
    return words, {"MPIRUN": hosts.launcher(mpirun_path())}


def begins(folder: Path, rank: int) -> list[int]:
    lines = map(json.loads, (folder / f"rank-{rank}.jsonl").read_text().splitlines())
    return [line["begin"] for line in lines if isinstance(line, dict)]


def attempts(run_dir: Path) -> list[dict[str, int]]:
    """The hosts of each attempt, with their ranks."""
    lines = (run_dir / "restarts.jsonl").read_text().splitlines()
    return [json.loads(line)["hosts"] for line in lines]


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[int]:
    """The end of a pipe that gets a byte of each rank before its first step."""
    path = tmp_path / "ready"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    yield pipe
    os.close(pipe)


def wait_for(ready: int, ranks: int) -> None:
    for _ in range(ranks):
        assert select.select([ready], [], [], LONGEST_SECONDS)[0], "a rank has not begun"
        os.read(ready, 1)


# -- one host ---------------------------------------------------------------------------


def test_a_killed_rank_starts_all_again(python: Path, tmp_path: Path) -> None:
    words = (*QUICK, "--run-dir=my r", "--set=data.path=a  b")
    job = start(python, "2", *words, STANDIN_KILL_AT="5")
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 0, said
    assert begins(tmp_path / "my r", 1) == [0, 4]
    [code] = re.findall(r"axsparse: the ranks ended with (\d+); going on from the last", said)
    assert int(code) in KILLED, said
    assert "axsparse: restart 1 of 3: ranks 2\n" in said
    first = json.loads((tmp_path / "my r" / "rank-0.jsonl").read_text().splitlines()[0])
    assert first["arguments"] == [*words, "--run-dir=my r", "--resume=auto"]
    assert first["ranks"] == "2"


@pytest.mark.parametrize(("code", "count"), [(78, 1), (75, 1), (70, 2)])
def test_only_what_a_restart_may_mend_is_started_again(
    python: Path, tmp_path: Path, code: int, count: int
) -> None:
    """The same end after the same step is not tried a third time."""
    job = start(python, "1", *QUICK, "--run-dir=r", STANDIN_EXIT=f"1:{code}")
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == code
    assert begins(tmp_path / "r", 0) == [0] * count
    last = "axsparse: error: the ranks ended with 70, and the same happened before, after step 1\n"
    assert said.endswith(last) == (count > 1)


def test_no_more_restarts_are_made_than_were_asked_for(python: Path, tmp_path: Path) -> None:
    job = start(python, "--restarts", "0", "1", *QUICK, "--run-dir=r", STANDIN_EXIT="3:70")
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert (job.returncode, begins(tmp_path / "r", 0)) == (70, [0])
    assert said.endswith("error: the ranks ended with 70, and no restart is left\n")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(
    python: Path, tmp_path: Path, ready: int, number: signal.Signals
) -> None:
    long = {"STANDIN_STEPS": "1000000000", "STANDIN_READY": str(tmp_path / "ready")}
    job = start(python, "2", *QUICK, "--run-dir=r", **long)
    wait_for(ready, 2)
    job.send_signal(number)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 75, said
    assert {path.name for path in (tmp_path / "r").glob("saved-?")} == {"saved-0", "saved-1"}


def test_a_run_has_one_supervisor(python: Path, tmp_path: Path, ready: int) -> None:
    long = {"STANDIN_STEPS": "1000000000", "STANDIN_READY": str(tmp_path / "ready")}
    first = start(python, "1", *QUICK, "--run-dir=r", **long)
    wait_for(ready, 1)
    second = start(python, "1", *QUICK, "--run-dir=r")
    _, said = second.communicate(timeout=LONGEST_SECONDS)
    first.send_signal(signal.SIGUSR1)
    first.communicate(timeout=LONGEST_SECONDS)

    assert (second.returncode, first.returncode) == (74, 75)
    assert f"r: is in use by process {first.pid} on " in said


def test_ranks_save_if_their_supervisor_is_killed(python: Path, tmp_path: Path, ready: int) -> None:
    """And a new supervisor goes on from there."""
    steps = {"STANDIN_STEPS": "400", "STANDIN_STEP_SECONDS": "0.02"}
    job = start(python, "2", *QUICK, "--run-dir=r", STANDIN_READY=str(tmp_path / "ready"), **steps)
    wait_for(ready, 2)
    job.kill()
    job.communicate(timeout=LONGEST_SECONDS)  # until the ranks have ended, which have its pipes

    again = start(python, "2", *QUICK, "--run-dir=r", **steps)
    _, said = again.communicate(timeout=LONGEST_SECONDS)
    assert again.returncode == 0, said
    [(first, second), (_, other)] = (begins(tmp_path / "r", rank) for rank in (0, 1))
    assert first == 0 < second < 400 and other < 400


# -- several hosts ----------------------------------------------------------------------


@pytest.mark.parametrize("how", by_default(["die"], ["die", "hang"]))
def test_a_host_that_is_gone_is_left_out_and_taken_in_again(
    python: Path, tmp_path: Path, ready: int, hosts: PretendHosts, how: str
) -> None:
    """It comes back while the others run, and the next restart has it."""
    words, environment = on_hosts(hosts, "a:1,b:1")
    steps = {"STANDIN_STEPS": "500", "STANDIN_STEP_SECONDS": "0.02", "STANDIN_READY_AT": "60"}
    job = start(
        python,
        *(*words, "2", *QUICK, "--run-dir=r", "--set=layout.g_inter=1"),
        **{**environment, **steps, "STANDIN_READY": str(tmp_path / "ready")},
    )
    wait_for(ready, 2)
    getattr(hosts, how)("b")
    wait_for(ready, 1)
    hosts.come_back("b")
    hosts.lose_processes("a")
    wait_for(ready, 2)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 0, said
    assert attempts(tmp_path / "r") == [{"a": 1, "b": 1}, {"a": 1}, {"a": 1, "b": 1}]


def test_a_spare_host_takes_the_place_of_one_that_is_drained(
    python: Path, tmp_path: Path, hosts: PretendHosts
) -> None:
    words, environment = on_hosts(hosts, "a:1,b:1,c:1")
    (hosts.folder / "a.down").touch()
    job = start(python, *words, "2", *QUICK, "--run-dir=r", **environment)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 0, said
    assert attempts(tmp_path / "r") == [{"b": 1, "c": 1}]


@pytest.mark.parametrize(
    ("there", "ranks", "settings", "missing"),
    by_default(
        [("a:1", "1", (), "no host answers")],
        [
            ("a:1", "1", (), "no host answers"),
            ("a:1,b:1", "2", ("--set", "layout.g_tensor=2"), "too few hosts for a stage answer"),
        ],
    ),
)
def test_without_enough_hosts_it_waits_for_one(
    python: Path,
    tmp_path: Path,
    hosts: PretendHosts,
    there: str,
    ranks: str,
    settings: tuple[str, ...],
    missing: str,
) -> None:
    words, environment = on_hosts(hosts, there)
    (hosts.folder / "a.down").touch()
    given = (*words, ranks, *QUICK, *settings, "--run-dir=r")
    job = start(python, "--wait", "1", *given, **environment)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 70
    assert said.splitlines() == [
        f"axsparse: {missing}; waits up to 1 s for one",
        f"axsparse: error: {missing} for 1 s; mend one, or --wait",
    ]
    assert not (tmp_path / "r").exists()


def test_fewer_ranks_keep_the_stages_and_have_fewer_replicas(
    python: Path, tmp_path: Path, hosts: PretendHosts
) -> None:
    words, environment = on_hosts(hosts, "a:2,b:2,c:2")
    (hosts.folder / "b.down").touch()
    fixed = ("--set=layout.g_inter=3", "--set=layout.g_data=2")
    job = start(python, *words, "6", *QUICK, *fixed, "--run-dir=r", **environment)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 0, said
    assert attempts(tmp_path / "r") == [{"a": 2, "c": 1}]
    first = json.loads((tmp_path / "r" / "rank-0.jsonl").read_text().splitlines()[0])
    assert first["arguments"][-3] == "--set=layout.g_data=1"


# -- mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 78, "the following arguments are required: RANKS"),
        (["some"], 78, "argument RANKS: 'some' is no whole number from 1 to 10000000"),
        (["0", *QUICK], 78, "argument RANKS: '0' is no whole number from 1 to 10000000"),
        (["2"], 78, "launch: nothing says what to train; name a configuration"),
        (["2", "--config", "no.yaml"], 66, "config 'no.yaml': no such file"),
        (["2", *QUICK, "--set", "trian.steps=3"], 78, "trian.steps (--set): unknown key"),
        (["--hosts", "a:1", "2", *QUICK], 78, "--hosts: a:1 take fewer than 2 ranks; name more"),
        (["--hosts", "a b", "2", *QUICK], 78, "--hosts: 'a b' is no list of different hosts"),
        (["--silence", "0", "2", *QUICK], 78, "'0' is no number of seconds from 1.5 to 1000000"),
        (
            ["--hosts", "a:2", "--probe", "no-such {host}", "2", *QUICK],
            *(66, "--probe: no command 'no-such'; install it, or name another one"),
        ),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    axsparse: Axsparse,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPIRUN", "true")

    assert_one_line(axsparse("launch", *words), code, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "hosts", "said"),
    [
        ("jsrun", "a:2", "--hosts: jsrun cannot leave out hosts; take mpirun, or leave it"),
        ("srun", "a:2,b:1", "--hosts: a:2 and others differ, and srun starts as many ranks on"),
    ],
)
def test_hosts_that_a_launcher_cannot_take_are_refused(
    launcher: str,
    hosts: str,
    said: str,
    tmp_path: Path,
    axsparse: Axsparse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / launcher
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(program))

    assert_one_line(axsparse("launch", "--hosts", hosts, "2", *QUICK), 78, said)
