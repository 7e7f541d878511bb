"""Trace files: the schema, writing and reading, and how two differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axsparse.observe.trace_file import (
    Difference,
    Span,
    differences,
    from_json,
    join,
    read,
    step_seconds,
    to_json,
    write,
    write_part,
)
from axsparse.runtime.errors import DataError, MissingInputError, OutputError

SPANS = [
    Span(1, 0, 0, "compute", "F0", 0.0, 1.0),
    Span(1, 0, 0, "bubble", "bubble", 1.0, 3.0),
    Span(1, 0, 1, "p2p", "p2p", 0.5, 0.75),
    Span(1, 1, 0, "compute", "F0", 0.0, 2.0),
]


def test_a_trace_is_what_chrome_opens() -> None:
    whole = json.loads(to_json(SPANS, "test"))
    events = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    names = [
        (event["name"], event["args"]["name"])
        for event in whole["traceEvents"]
        if event["ph"] == "M"
    ]

    assert events[2] == {
        "ph": "X",
        "name": "p2p",
        "cat": "p2p",
        "pid": 0,
        "tid": 1,
        "ts": 0.5e6,
        "dur": 0.25e6,
        "args": {"step": 1},
    }
    assert ("process_name", "replica 1") in names and ("thread_name", "stage 1") in names
    assert whole["otherData"]["source"] == "test"


def test_a_trace_that_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    write(path, SPANS, "test")

    assert read(path) == SPANS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": [{"ph": "X"}]}',
        to_json([Span(1, 0, 0, "lunch", "lunch", 0, 1)], ""),
    ],
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"here: no trace of axsparse \(.*; give one that"):
        from_json(text, "here")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingInputError, match=r"trace .*none.json: cannot be read \(.*name the file of a trace"
    ):
        read(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"the trace cannot be written \(.*; choose another"):
        write(tmp_path / "file" / "trace.json", SPANS, "test")


def test_joined_parts_are_the_trace_and_are_gone(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("a", "b", "c", "d")]
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]  # the last rank has no spans
    for path, rank in zip(parts, ranks, strict=True):
        write_part(path, *rank, [span for span in SPANS if (span.replica, span.stage) == rank])
    join(tmp_path / "joined.json", parts, "test")

    assert [path.name for path in tmp_path.iterdir()] == ["joined.json"]
    text = (tmp_path / "joined.json").read_text()
    assert read(tmp_path / "joined.json") == SPANS
    assert json.loads(text)["otherData"] == {"source": "test"}
    assert text.count("thread_name") == 4 and text.count("process_name") == 2


def test_a_part_that_rank_0_cannot_see_is_named_and_the_others_stay(tmp_path: Path) -> None:
    write_part(tmp_path / "own", 0, 0, SPANS[:2])

    with pytest.raises(OutputError, match=r"other: rank 0 cannot read .*where all hosts see it"):
        join(tmp_path / "joined.json", [tmp_path / "own", tmp_path / "other"], "test")
    assert (tmp_path / "own").exists()


def test_an_empty_trace_is_one() -> None:
    assert from_json(to_json([], "test"), "here") == []


def test_bytes_that_are_no_text_are_no_trace(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="no trace of axsparse"):
        read(tmp_path / "bytes")


def test_differences_are_of_mean_seconds_the_largest_first() -> None:
    # Over two steps of one replica: stage 0 computes 1.5 s, the bubble is gone.
    second = [
        Span(1, 0, 0, "compute", "F0", 0.0, 1.0),
        Span(2, 0, 0, "compute", "F0", 5.0, 7.0),
        Span(1, 0, 1, "p2p", "p2p", 0.5, 1.0),
    ]

    assert differences(SPANS, second) == [
        Difference(0, "bubble", 1.0, 0.0),
        Difference(1, "p2p", 0.25, 0.5),
        Difference(0, "compute", 1.5, 1.5),
    ]


def test_a_step_lasts_from_its_first_begin_to_its_last_end() -> None:
    assert step_seconds(SPANS) == 3.0
    assert step_seconds([*SPANS, Span(2, 0, 0, "compute", "F0", 9.0, 10.0)]) == 2.0
    assert step_seconds([]) == 0.0
