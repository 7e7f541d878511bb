"""Lists of actions: as text, such as "F0 F1 B0", and what a stage holds that plays them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from axsparse.pipeline.policy import LETTERS, Action, Kind
from axsparse.pipeline.simulator import Durations


def to_text(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [Action(kinds[word[0]], int(word[1:])) for word in text.split()]


def uniform_durations(
    g_inter: int, microbatches: int, forward: float, backward: float, weight: float = 0.0
) -> Durations:
    """Durations that are the same for all microbatches on all stages."""
    return Durations(
        *([[seconds] * microbatches] * g_inter for seconds in (forward, backward, weight))
    )


def peak_in_flight(actions: Iterable[Action], size: float = 1.0) -> float:
    """The most that a stage holds at a time, in units of a microbatch in flight.

    A microbatch that waits for its weight gradients, if backwards are split, takes `size`.
    """
    done = list(actions)
    later = size if any(each.kind is Kind.WEIGHT for each in done) else 0.0
    change = {Kind.FORWARD: 1.0, Kind.BACKWARD: later - 1, Kind.WEIGHT: -later}
    return max(itertools.accumulate((change[each.kind] for each in done), initial=0.0))
