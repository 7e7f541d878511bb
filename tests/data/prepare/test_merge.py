"""Joining the pieces of a document that reaches over several parts."""

from __future__ import annotations

from typing import Any

import pytest

from axsparse.data.prepare.documents import HUGE_LINE, NOT_UTF8, Problem
from axsparse.data.prepare.merge import joined
from axsparse.data.prepare.part import Fragment


def fragment(**values: Any) -> Fragment:
    plain = {
        **{"place": "a, byte 0", "tokens": 5, "opens": True, "closes": False, "problem": None},
        **{"blank": False, "validation": False, "lead": 3, "trail": 1},
    }
    return Fragment(**{**plain, **values})


END = fragment(place="a, byte 9", tokens=7, opens=False, closes=True, lead=4, trail=2)


def test_a_whole_has_the_beginning_of_the_first_and_the_end_of_the_second() -> None:
    assert joined(fragment(), END, 9) == fragment(tokens=12, closes=True, trail=2)


@pytest.mark.parametrize(
    ("first", "second", "lead", "trail"),
    [
        ({}, {"trail": None}, 3, 5),
        ({"trail": None}, {}, 7, 2),
        ({"trail": None}, {"trail": None}, 7, None),
    ],
)
def test_a_line_may_reach_over_any_number_of_pieces(
    first: dict[str, Any], second: dict[str, Any], lead: int, trail: int | None
) -> None:
    whole = joined(fragment(**first), END.model_copy(update=second), 9)

    assert (whole.lead, whole.trail) == (lead, trail)


@pytest.mark.parametrize(("trail", "problem"), [(5, None), (6, HUGE_LINE)])
def test_a_line_across_a_cut_counts_as_one(trail: int, problem: Problem | None) -> None:
    assert joined(fragment(trail=trail), END, 9).problem == problem


def test_a_problem_of_either_is_one_of_the_whole() -> None:
    spoilt = END.model_copy(update={"problem": NOT_UTF8})

    assert joined(fragment(), spoilt, 9).problem == NOT_UTF8
    assert joined(fragment(problem=NOT_UTF8), END, 9).problem == NOT_UTF8


def test_the_first_words_of_a_document_decide_its_split() -> None:
    held_out = END.model_copy(update={"validation": True})

    assert not joined(fragment(), held_out, 9).validation
    whole = joined(fragment(blank=True), held_out, 9)
    assert whole.validation
    assert not whole.blank
