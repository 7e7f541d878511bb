"""Timelines of a step."""

from __future__ import annotations

import random
from itertools import pairwise

from axsparse.observe.timeline_picture import joined
from axsparse.observe.trace_file import Span


def spans(count: int, stages: int = 2) -> list[Span]:
    """Short spans of drawn lengths, and a long one now and then, without gaps."""
    draw = random.Random(3)  # noqa: S311 - lengths of a drawing
    found = []
    for stage in range(stages):
        now = 0.0
        for number in range(count):
            length = 1.0 if number % 500 == 250 else draw.random() / 1000
            phase = draw.choice(["compute", "bubble", "p2p"])
            found.append(Span(1, 0, stage, phase, phase, now, now + length))
            now += length
    return found


def test_few_spans_stay_as_they_are() -> None:
    own = spans(20)

    assert joined(own, 40) == own


def test_many_short_spans_are_joined_without_gaps_and_long_ones_stay() -> None:
    own = spans(5000)
    drawn = joined(own, 400)

    assert len(drawn) <= 420
    for stage in (0, 1):
        before = [s for s in own if s.stage == stage]
        after = [s for s in drawn if s.stage == stage]
        assert (after[0].begin, after[-1].end) == (before[0].begin, before[-1].end)
        assert all(a.end == b.begin for a, b in pairwise(after))
        assert sum(s.end - s.begin >= 1 for s in after) == sum(s.end - s.begin >= 1 for s in before)


def test_a_joined_span_has_the_phase_that_takes_most_of_it() -> None:
    lengths = {"bubble": 0.001, "compute": 0.006, "p2p": 0.002}
    own, now = [Span(1, 0, 0, "compute", "F0", -10.0, 0.0)], 0.0
    for phase, length in [*lengths.items()] * 10:
        own.append(Span(1, 0, 0, phase, phase, now, now + length))
        now += length
    own.append(Span(1, 0, 0, "p2p", "p2p", now, 10.0))

    assert [span.phase for span in joined(own, 20)] == ["compute", "compute", "p2p"]
