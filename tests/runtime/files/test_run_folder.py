"""The lock that keeps two jobs out of one run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from axsparse.runtime.errors import OutputError
from axsparse.runtime.files.run_folder import RunLock, RunMark


def test_the_file_says_who_has_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSB_JOBID", "12")
    earlier = {"host": "x" * 5_000, "process": 1, "job": None}
    (tmp_path / "run.lock").write_text(json.dumps(earlier))

    RunLock(tmp_path)

    said = json.loads((tmp_path / "run.lock").read_text())
    assert said == {"host": socket.gethostname(), "process": os.getpid(), "job": "12"}


def test_a_holder_is_named_with_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    RunMark.of(tmp_path)
    lock = RunLock(tmp_path)

    process, here = os.getpid(), f"{tmp_path}: is in use by"
    holders = {
        process + 1: f"job 4711, process {process} on {socket.gethostname()}; wait for its end",
        process: "a Trainer of this program; close() it",
    }
    for other, holder in holders.items():
        monkeypatch.setattr(os, "getpid", lambda now=other: now)
        with pytest.raises(OutputError) as caught:
            RunLock(tmp_path)
        assert (
            str(caught.value)
            == f"{here} {holder}, or choose another --run-dir (in Python run_dir=)"
        )
    (tmp_path / "run.lock").write_text("[]")
    with pytest.raises(OutputError, match="is in use by another process; wait"):
        RunLock(tmp_path)
    del lock  # it is free again once nobody knows of it
    RunLock(tmp_path).release()


def test_a_place_without_locks_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(number: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)

    RunLock(tmp_path).release()

    assert capsys.readouterr().err == (
        f"axsparse: warning: {tmp_path}/run.lock: cannot be locked (No locks available); see that "
        "no other job uses this directory\n"
    )
