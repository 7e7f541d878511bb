"""Traces: the schema, writing and reading, and steps of all ranks in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.devices import Clock
from support.runs import on_ranks

from axsparse.observe.phases import Phases
from axsparse.observe.trace_file import Span, TraceRecorder, join, part, read
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import OutputError
from axsparse.runtime.grid import Grid

SPANS = [
    Span(1, 0, 0, "compute", "F0", 0.0, 1.0),
    Span(1, 0, 0, "bubble", "bubble", 1.0, 3.0),
    Span(1, 0, 1, "p2p", "p2p", 0.5, 0.75),
    Span(1, 1, 0, "compute", "F0", 0.0, 2.0),
]


def test_joined_parts_are_what_chrome_opens_and_are_gone(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("a", "b", "c", "d")]
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]  # the last rank has no spans
    for path, rank in zip(parts, ranks, strict=True):
        spans = [span for span in SPANS if (span.replica, span.stage) == rank]
        path.write_text(part(*rank, spans))
    join(tmp_path / "joined.json", parts, "test")

    assert [path.name for path in tmp_path.iterdir()] == ["joined.json"]
    assert read(tmp_path / "joined.json") == SPANS
    full = json.loads((tmp_path / "joined.json").read_text())
    assert full["otherData"] == {"source": "test"}
    events = {kind: [e for e in full["traceEvents"] if e["ph"] == kind] for kind in "MX"}
    names = [(event["name"], event["args"]["name"]) for event in events["M"]]
    assert sorted(names) == [
        *[("process_name", f"replica {n}") for n in range(2)],
        *[("thread_name", f"stage {n}") for n in (0, 0, 1, 1)],
    ]
    assert events["X"][2] == {
        "ph": "X",
        "name": "p2p",
        "cat": "p2p",
        "pid": 0,
        "tid": 1,
        "ts": 0.5e6,
        "dur": 0.25e6,
        "args": {"step": 1},
    }


def test_a_part_that_rank_0_cannot_see_is_named_and_the_others_stay(tmp_path: Path) -> None:
    (tmp_path / "own").write_text(part(0, 0, SPANS[:2]))

    with pytest.raises(OutputError, match=r"other: rank 0 cannot read .*where all hosts see it"):
        join(tmp_path / "joined.json", [tmp_path / "own", tmp_path / "other"], "test")
    assert (tmp_path / "own").exists()


# -- steps of all ranks -----------------------------------------------------------------


def play(transport: Transport, folder: Path, actions: int = 1) -> int:
    """Four steps on a host whose clock shows anything; rank r computes r + 1 seconds. Returns the
    bytes that it has sent."""
    rank = transport.rank
    clock, coords = Clock(1000.0 * rank), Grid(2, 1).coords(rank)
    phases = Phases(clock)
    tracing = TraceRecorder(transport, coords, phases, folder, range(2, 4), clock)
    for step in range(1, 5):
        tracing.begin(step)
        phases.begin_step()
        for number in range(actions):
            phases.action = f"F{number}"
            with phases("compute"):
                clock.now += rank + 1
        phases.action = ""
        with phases("bubble"):
            clock.now += 3
        with phases("bubble"):
            clock.now += 1
        phases.end_step()
        clock.now += 0.5
        tracing.end(step)
    return transport.world.bytes_sent


def test_the_steps_asked_for_are_traced_on_all_ranks_from_one_zero(tmp_path: Path) -> None:
    on_ranks(2, lambda transport: play(transport, tmp_path))

    [path] = (tmp_path / "trace").iterdir()
    assert path.name == "steps-2-3.json"
    assert read(path) == [
        Span(2, 0, 0, "compute", "F0", 0.0, 1.0),
        Span(2, 0, 0, "bubble", "bubble", 1.0, 5.0),
        Span(3, 0, 0, "compute", "F0", 5.5, 6.5),
        Span(3, 0, 0, "bubble", "bubble", 6.5, 10.5),
        Span(2, 0, 1, "compute", "F0", 0.0, 2.0),
        Span(2, 0, 1, "bubble", "bubble", 2.0, 6.0),
        Span(3, 0, 1, "compute", "F0", 6.5, 8.5),
        Span(3, 0, 1, "bubble", "bubble", 8.5, 12.5),
    ]


def test_a_part_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "trace" / "steps-2-3.rank-1").mkdir(parents=True)

    def failure(transport: Transport) -> str:
        with pytest.raises(OutputError) as error:
            play(transport, tmp_path)
        return str(error.value)

    for told in on_ranks(2, failure):
        assert "rank-1: the trace cannot be written (Is a directory)" in told


def test_no_rank_sends_its_spans(tmp_path: Path) -> None:
    assert max(on_ranks(2, lambda transport: play(transport, tmp_path, actions=200))) < 1000
