"""The names of actions."""

from __future__ import annotations

import pytest
from support.action_text import from_text, to_text

from axsparse.pipeline.actions import Action, Kind, action
from axsparse.runtime.communication import Direction


def test_an_action_reads_as_its_kind_and_microbatch() -> None:
    assert [str(Action(kind, 12)) for kind in Kind] == ["F12", "B12", "W12"]


def test_lists_of_actions_survive_the_way_through_text() -> None:
    assert to_text(from_text("F0 F1 B0 W0 B1 W1")) == "F0 F1 B0 W0 B1 W1"


@pytest.mark.parametrize("kind", [Kind.BACKWARD, Direction.BACKWARD])
def test_an_action_that_is_named_again_is_the_same_object(kind: Kind) -> None:
    assert action(kind, 3) == Action(Kind.BACKWARD, 3)
    assert action(kind, 3) is action(Kind.BACKWARD, 3)
    assert action(kind, 3).kind is Kind.BACKWARD


def test_activations_and_their_gradients_travel_and_weight_gradients_stay() -> None:
    assert [action(kind, 0).direction for kind in Kind] == [
        Direction.FORWARD,
        Direction.BACKWARD,
        None,
    ]
