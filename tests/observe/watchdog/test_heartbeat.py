"""Ranks know of one another by small files, and name the rank that the others wait for."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.observe.watchdog.heartbeat import (
    RECORD_BYTES,
    Heartbeat,
    HeartbeatFolder,
    RankView,
    error_line,
    process_state,
    report,
    straggler,
)
from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.grid import Grid

BEAT = Heartbeat(
    written=3,
    quiet=0.5,
    waits=False,
    task="training",
    step=25,
    phase="compute",
    action="F3",
    awaited=("activation 3 from rank 0",),
    host="node7",
    process=4711,
)


@pytest.fixture
def folders(tmp_path: Path) -> list[HeartbeatFolder]:
    HeartbeatFolder(tmp_path, 0).clear()
    return [HeartbeatFolder(tmp_path, rank) for rank in range(2)]


def test_others_read_what_a_rank_writes_and_its_stacks_as_long_as_it_is_quiet(
    folders: list[HeartbeatFolder],
) -> None:
    assert folders[0].read(1) is None
    assert folders[0].stacks_of(1) == ""
    folders[1].write(BEAT, "thread one:\n  line")
    assert folders[0].stacks_of(1) == "thread one:\n  line"
    assert folders[0].read(1) == BEAT
    folders[1].write(BEAT)
    assert folders[0].stacks_of(1) == ""


def test_on_a_full_disk_a_heartbeat_goes_before_the_stacks(
    folders: list[HeartbeatFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def full(number: int, content: bytes, at: int) -> int:
        if at + len(content) > RECORD_BYTES:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(number, content, at)

    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(OSError):
        folders[1].write(BEAT, "stacks")

    assert folders[0].read(1) == BEAT


def test_a_heartbeat_says_where_a_rank_stands() -> None:
    assert str(BEAT) == "compute (F3) of step 25"
    assert str(replace(BEAT, phase="data", action="")) == "data of step 25"
    assert str(replace(BEAT, task="evaluation")) == "evaluation after step 25 (compute, F3)"
    assert str(replace(BEAT, task="checkpoint", phase="other", action="")) == (
        "checkpoint after step 25 (other)"
    )


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.text(max_size=40).map(str.encode),
        st.sampled_from([b"{}", b"[]", b"null", b'{"written": 1}', b'{"awaited": []}']),
    )
)
def test_whatever_stands_in_a_file_is_a_heartbeat_or_none(
    tmp_path_factory: pytest.TempPathFactory, contents: bytes
) -> None:
    folder = tmp_path_factory.mktemp("heartbeats")
    heartbeats = HeartbeatFolder(folder, 0)
    (folder / "rank-1.json").write_bytes(contents)

    assert heartbeats.read(1) is None


# -- the rank that is named when a run hangs, and the report on every rank ------------------------

GRID = Grid(2, 2)
WAITING = replace(BEAT, quiet=40.0, waits=True, awaited=())
PLACE = Path("runs/my/hang-report.txt")


def seen(rank: int, quiet: float = 40.0, **changes: Any) -> RankView:
    return replace(
        RankView(GRID.coords(rank), WAITING, quiet, stacks=f"stacks of {rank}"), **changes
    )


def working(rank: int, quiet: float = 40.0) -> RankView:
    return seen(rank, quiet, heartbeat=replace(WAITING, waits=False))


def silent(rank: int, quiet: float = 40.0) -> RankView:
    return seen(rank, quiet, is_silent=True, stacks="")


def gone(rank: int) -> RankView:
    return seen(rank, heartbeat=None, stacks="")


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([seen(0), working(1), gone(2), silent(3)], 3),
        ([seen(0), working(1), gone(2), seen(3, 90.0)], 1),
        ([seen(0), seen(1), gone(2), seen(3, 90.0)], 2),
        ([seen(0), seen(1, 41.0), seen(2), seen(3)], 1),
        ([working(0, 40.0), working(1, 50.0), working(2, 45.0), seen(3, 90.0)], 1),
    ],
    ids=["silent", "does not wait", "gone", "all wait", "the first that stalled"],
)
def test_the_rank_that_others_wait_for_is_named(ranks: list[RankView], named: int) -> None:
    assert straggler(ranks).coords.rank == named


def test_a_stopped_rank_is_told_of_by_what_it_did_last_and_what_others_await() -> None:
    waiting = seen(0, heartbeat=replace(WAITING, step=26, awaited=("gradient 5 from rank 1",)))
    stopped = replace(silent(1), system="its process is stopped by a signal")

    line = error_line([waiting, stopped, seen(2)], PLACE)

    assert line == (
        "rank 1 (stage 1, replica 0): hangs, last seen in compute (F3) of step 25: its process is "
        "stopped by a signal; rank 0 awaits its gradient 5 in step 26; the stacks of all ranks are "
        f"in runs/my/hang-report.txt; {RESUME_AUTO} goes on from the last checkpoint, and a larger "
        "watchdog.timeout waits longer"
    )


def test_a_rank_that_is_not_there_is_named_without_a_phase() -> None:
    line = error_line([seen(0), gone(1), seen(2)], PLACE)

    assert line.startswith(
        "rank 1 (stage 1, replica 0): hangs: it is not there, and all others wait; the stacks"
    )


def test_the_report_has_the_line_then_each_rank_then_all_stacks() -> None:
    text = report([seen(0), gone(1), silent(2), working(3)], "the line")

    assert text == (
        "the line\n\n"
        "rank 0 (stage 0, replica 0) on node7, process 4711: waits in compute (F3) of step 25, "
        "40 s without progress\n"
        "rank 1 (stage 1, replica 0): has left, or never began to train\n"
        "rank 2 (stage 0, replica 1) on node7, process 4711: does not answer (its Python does not "
        "run), last seen in compute (F3) of step 25, 40 s without progress\n"
        "rank 3 (stage 1, replica 1) on node7, process 4711: is in compute (F3) of step 25, "
        "40 s without progress\n\n"
        "rank 2 (stage 0, replica 1):\nno stacks: it did not answer\n\n"
        "rank 0 (stage 0, replica 0):\nstacks of 0\n\n"
        "rank 1 (stage 1, replica 0):\nno stacks: it is not there\n\n"
        "rank 3 (stage 1, replica 1):\nstacks of 3\n"
    )


def test_the_system_says_what_a_process_does() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

        assert process_state(process.pid) == "its process is stopped by a signal"

        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(process.pid) == "its process has ended"
    finally:
        process.kill()
        process.communicate()
    assert process_state(process.pid) == "its process is gone"
    assert process_state(os.getpid()) == ""
