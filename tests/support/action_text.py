"""Lists of actions: as text, such as "F0 F1 B0", and played against each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from axsparse.pipeline.policy import LETTERS, Action, InOrder, Kind


def to_text(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [Action(kinds[word[0]], int(word[1:])) for word in text.split()]


def dry_run(stages: Sequence[Sequence[Action]]) -> list[float]:
    """Play the action lists of all stages against each other, without times.

    Returns how many microbatches each stage holds at most: those whose forward has begun, less
    those whose backward has, or whose weight gradients if backwards are split. ValueError for a
    list that is no schedule (see `InOrder`), for lists of different lengths, and for a deadlock,
    with the action that each stage waits for.
    """
    if len({len(actions) for actions in stages}) > 1:
        counts = ", ".join(str(len(actions)) for actions in stages)
        raise ValueError(f"schedule: the stages have {counts} actions; all need the same")
    policies = [InOrder(a, stage=s, g_inter=len(stages)) for s, a in enumerate(stages)]
    done = [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for stage, policy in enumerate(policies):
            while (run := policy.next()) is not None:
                moved = True
                done[stage] += 1
                if run.direction is None:
                    continue
                target = stage + (1 if run.kind is Kind.FORWARD else -1)
                if 0 <= target < len(stages):
                    policies[target].arrived(run.direction, run.microbatch)
    if not all(policy.finished for policy in policies):
        waits = ", ".join(
            f"stage {stage} for {actions[at]}"
            for stage, (actions, at) in enumerate(zip(stages, done, strict=True))
            if at < len(actions)
        )
        raise ValueError(f"schedule: a deadlock; waiting are {waits}")
    return [peak_in_flight(actions) for actions in stages]


def peak_in_flight(actions: Iterable[Action], size: float = 1.0) -> float:
    """The most that a stage holds at a time, in units of a microbatch in flight.

    A microbatch that waits for its weight gradients, if backwards are split, takes `size`.
    """
    done = list(actions)
    later = size if any(each.kind is Kind.WEIGHT for each in done) else 0.0
    change = {Kind.FORWARD: 1.0, Kind.BACKWARD: later - 1, Kind.WEIGHT: -later}
    return max(itertools.accumulate((change[each.kind] for each in done), initial=0.0))
