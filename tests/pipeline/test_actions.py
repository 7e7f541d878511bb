"""The names of actions."""

from __future__ import annotations

from axsparse.pipeline.actions import Action, action
from axsparse.runtime.communication import Direction


def test_an_action_reads_as_its_kind_and_microbatch() -> None:
    assert [str(Action(direction, 12)) for direction in Direction] == ["F12", "B12"]


def test_an_action_that_is_named_again_is_the_same_object() -> None:
    assert action(Direction.BACKWARD, 3) == Action(Direction.BACKWARD, 3)
    assert action(Direction.BACKWARD, 3) is action(Direction.BACKWARD, 3)
