"""Ranks know of one another by small files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.observe.watchdog.heartbeat import RECORD_BYTES, Board, Heartbeat, RankAnswer

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
def boards(tmp_path: Path) -> list[Board]:
    Board.clear(tmp_path)
    return [Board(tmp_path, rank) for rank in range(2)]


def test_what_a_rank_writes_others_read(boards: list[Board]) -> None:
    boards[1].write(BEAT)

    assert boards[0].read(1) == BEAT
    assert boards[0].read(0) is None


def test_a_shorter_record_leaves_nothing_of_a_longer_one(boards: list[Board]) -> None:
    boards[1].write(replace(BEAT, host="n" * 200))

    boards[1].write(BEAT)

    assert boards[0].read(1) == BEAT
    assert (boards[0].folder / "rank-1.json").stat().st_size == RECORD_BYTES


def test_one_rank_reports(boards: list[Board]) -> None:
    assert not boards[1].is_claimed

    assert [board.claim() for board in boards] == [True, False]
    assert boards[1].is_claimed


def test_an_answer_has_a_heartbeat_and_stacks(boards: list[Board]) -> None:
    assert boards[0].answer_of(1) is None

    boards[1].answer(RankAnswer(BEAT, "thread one:\n  line"))

    assert boards[0].answer_of(1) == RankAnswer(BEAT, "thread one:\n  line")


def test_a_new_run_begins_with_an_empty_folder(tmp_path: Path, boards: list[Board]) -> None:
    boards[0].claim()
    boards[1].answer(RankAnswer(BEAT, ""))

    Board.clear(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told_of_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Board(tmp_path / "nowhere", 0)


def test_the_last_rank_to_leave_takes_the_folder_away(tmp_path: Path) -> None:
    folder = tmp_path / "heartbeat"
    Board.clear(folder)
    boards = [Board(folder, rank) for rank in range(2)]
    assert folder.stat().st_mode & 0o077 == 0

    boards[1].leave()
    assert boards[0].read(1) is None and folder.is_dir()
    boards[0].leave()

    assert not folder.exists()


def test_a_heartbeat_says_where_a_rank_stands() -> None:
    assert str(BEAT) == "compute (F3) of step 25"
    assert str(replace(BEAT, phase="data", action="")) == "data of step 25"
    assert str(replace(BEAT, task="evaluation")) == "evaluation after step 25 (compute, F3)"
    assert str(replace(BEAT, task="checkpoint", phase="other", action="")) == (
        "checkpoint after step 25 (other)"
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.one_of(st.binary(max_size=80), st.text(max_size=40).map(str.encode)))
def test_whatever_stands_in_a_file_is_a_heartbeat_or_none(
    tmp_path_factory: pytest.TempPathFactory, contents: bytes
) -> None:
    folder = tmp_path_factory.mktemp("board")
    board = Board(folder, 0)
    (folder / "rank-1.json").write_bytes(contents)

    assert board.read(1) is None


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"written": 1}'])
def test_other_json_is_no_heartbeat(text: str) -> None:
    with pytest.raises(ValueError):
        Heartbeat.from_json(text)
