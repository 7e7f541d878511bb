"""Actions as text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pipeline.actions import Action, action, from_text, to_text
from axsparse.runtime.communication import Direction


def test_an_action_reads_as_its_kind_and_microbatch() -> None:
    assert [str(Action(direction, 12)) for direction in Direction] == ["F12", "B12"]


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(Direction), st.integers(0, 10**12))
def test_text_and_action_are_inverse(direction: Direction, microbatch: int) -> None:
    action = Action(direction, microbatch)

    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "3", "f3", "W3", "F-1", "F03", "F3 ", " F3", "F3B2", "F٣", "F3\n"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not F or B and a microbatch number, such as F3"):
        Action.parse(text)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.builds(Action, st.sampled_from(Direction), st.integers(0, 99))))
def test_text_and_a_list_of_actions_are_inverse(actions: list[Action]) -> None:
    assert from_text(to_text(actions)) == actions


def test_a_list_reads_as_its_actions_with_a_space_between() -> None:
    assert to_text(from_text(" F0\tF1\n B0 ")) == "F0 F1 B0"


def test_an_action_that_is_named_again_is_the_same_object() -> None:
    assert action(Direction.BACKWARD, 3) == Action(Direction.BACKWARD, 3)
    assert action(Direction.BACKWARD, 3) is action(Direction.BACKWARD, 3)
