"""Ranks know of one another by small files."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.observe.watchdog.heartbeat import RECORD_BYTES, Heartbeat, HeartbeatFolder

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
    HeartbeatFolder.clear(tmp_path)
    return [HeartbeatFolder(tmp_path, rank) for rank in range(2)]


def test_what_a_rank_writes_others_read(folders: list[HeartbeatFolder]) -> None:
    folders[1].write(BEAT)

    assert folders[0].read(1) == BEAT
    assert folders[0].read(0) is None


def test_one_rank_reports(folders: list[HeartbeatFolder]) -> None:
    assert [heartbeats.claim() for heartbeats in folders] == [True, False]


def test_stacks_are_there_as_long_as_a_rank_is_quiet(folders: list[HeartbeatFolder]) -> None:
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


def test_a_new_run_begins_with_an_empty_folder(
    tmp_path: Path, folders: list[HeartbeatFolder]
) -> None:
    folders[0].claim()
    folders[1].write(BEAT, "any")

    HeartbeatFolder.clear(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_says_where_a_rank_stands() -> None:
    assert str(BEAT) == "compute (F3) of step 25"
    assert str(replace(BEAT, phase="data", action="")) == "data of step 25"
    assert str(replace(BEAT, task="evaluation")) == "evaluation after step 25 (compute, F3)"
    assert str(replace(BEAT, task="checkpoint", phase="other", action="")) == (
        "checkpoint after step 25 (other)"
    )


@settings(deadline=None, derandomize=True, max_examples=60)
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
